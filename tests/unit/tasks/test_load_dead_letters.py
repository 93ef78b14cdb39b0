"""Rows that a load could not bring: letters of the table once it came from that load, and no sooner."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tailrace.cli.main import main
from tailrace.deadletters.store import DeadLetterBatch, DeadLetterStore
from tailrace.errors import DeadLettersFull, ExitCode
from tailrace.model import change
from tailrace.model.position import Lsn
from tailrace.tables.spec import LoadOrigin, TableSpec
from tailrace.tasks import load_dead_letters
from tailrace.tasks.load_dead_letters import LoadRejects
from tailrace.tasks.load_store import LoadStore, StagedChunk
from tests.support.changes import SHOP, delete, insert, record_batches, update
from tests.support.quiet import THINGS, Quiet

SEEN = Lsn(0x1000)
NAN = [{"column": "n", "text": "NaN"}]


def marked(*rows: dict[str, Any], bad: tuple[int, ...] = ()) -> list[tuple[pa.RecordBatch, pa.Array]]:
    """Rows as a reading gives them, with those of some keys unfit."""
    cells = [NAN if row["id"] in bad else None for row in rows]
    (batch,) = record_batches(SHOP, rows)
    return [(batch, pa.array(cells, change.UNFIT_TYPE))]


def aside(*rows: dict[str, Any], bad: tuple[int, ...] = ()) -> tuple[LoadRejects, list[dict[str, Any]]]:
    kept = LoadRejects(SHOP, TableSpec(), LoadOrigin(seq=0, position="0/0", read_at=7), SEEN)
    return kept, [row for batch in kept.without_rejects(marked(*rows, bad=bad)) for row in batch.to_pylist()]


def bundle(*keys: int) -> DeadLetterBatch:
    kept, _ = aside(*({"id": key, "name": "n"} for key in keys), bad=keys)
    return DeadLetterBatch(schema=SHOP, rows=kept.dead_letters)


@pytest.fixture
def quiet(tmp_path: Path) -> Quiet:
    """A table that a load has brought but for row 3."""
    made = Quiet(tmp_path, on_bad_row="dead-letter")
    made.diary.commit()
    land(made, "first", [1, 2], bad=[3])
    return made


def land(quiet: Quiet, name: str, keys: list[int], bad: list[int]) -> None:
    """What a load leaves that brought some rows and could not bring others."""
    quiet.reload([{"id": key, "n": 0} for key in keys], name, dead_letters=[bundle(*bad)] if bad else [])


def letters(quiet: Quiet) -> dict[int, int]:
    """The key of each open letter, by its number."""
    found = DeadLetterStore(quiet.settings.log.path, THINGS).read_open(
        quiet.applied_position.seq, quiet.applied_position.load
    )
    rows = [row for one in found for row in one.changes.to_pylist()]
    return {row[change.SEQ]: row["id"] for row in rows}


def test_a_row_is_either_read_or_a_letter_with_all_that_was_read_of_it() -> None:
    kept, rows = aside({"id": 1, "n": 1}, {"id": 2, "name": "kept"}, {"id": 3, "n": 3}, bad=(2,))
    assert [row["id"] for row in rows] == [1, 3]
    (letter,) = kept.dead_letters.to_pylist()
    assert (letter["id"], letter["name"], letter["n"], letter[change.UNFIT]) == (2, "kept", None, NAN)
    assert (letter[change.OP], letter[change.POSITION], letter["_cause_code"]) == ("read", str(SEEN), "value-unfit")
    assert "column=n" in letter["_cause"]


def test_what_the_table_cannot_be_partitioned_by_is_a_letter_too() -> None:
    kept = LoadRejects(SHOP, TableSpec(partition_by=("name",)), LoadOrigin(seq=0, position="0/0", read_at=7), SEEN)
    rows = marked({"id": 1, "name": "a"}, {"id": 2, "name": ""})
    assert [row["id"] for batch in kept.without_rejects(rows) for row in batch.to_pylist()] == [1]
    assert "a value cannot be a partition value" in kept.dead_letters.column("_cause")[0].as_py()


def test_more_than_a_person_could_look_at_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_dead_letters, "DEAD_LETTERS_MAX", 1)
    with pytest.raises(DeadLettersFull, match="the load has too many dead letters"):
        aside({"id": 1}, {"id": 2}, bad=(1, 2))


def test_the_letters_of_a_chunk_are_found_again(tmp_path: Path) -> None:
    seeds = LoadStore(tmp_path)
    seeds.folder("abc").mkdir(parents=True)
    seeds.store_dead_letters("abc", 4, SHOP, bundle(7).rows)
    done = StagedChunk(chunk=4, files=(), rows=0, bytes=0, seconds=0.0, seen_until=SEEN, dead_letters=1)
    seeds.record_chunk("abc", done)
    assert seeds.staged_chunks("abc") == {4: done}
    (found,) = seeds.dead_letters("abc", [done])
    assert (found.schema, found.changes.column("id").to_pylist()) == (SHOP, [7])
    old = {name: value for name, value in done.to_json().items() if name != "letters"}
    assert StagedChunk.from_json(old).dead_letters == 0, "as it was recorded before"


def test_they_count_once_the_table_came_from_the_load(quiet: Quiet) -> None:
    assert letters(quiet) == {-1: 3}
    mine = DeadLetterStore(quiet.settings.log.path, THINGS)
    mine.before_load("second", whole=True, now="first", seq=quiet.applied_position.seq)
    mine.write_load_rejects("second", quiet.applied_position.seq, [bundle(1, 2)])
    assert letters(quiet) == {-1: 3}, "it has not landed"
    quiet.commit(insert(9, n=9))
    quiet.apply()
    assert (letters(quiet), quiet.ns()) == ({-1: 3}, {1: 0, 2: 0, 9: 9}), "and never did"
    land(quiet, "third", [9], bad=[1])
    assert letters(quiet) == {-2: 1}, "a whole load takes those of before with it"


def test_a_landing_that_is_tried_again_leaves_each_row_once(quiet: Quiet) -> None:
    mine = DeadLetterStore(quiet.settings.log.path, THINGS)
    mine.before_load("second", whole=True, now="first", seq=quiet.applied_position.seq)
    mine.write_load_rejects("second", quiet.applied_position.seq, [bundle(1, 2)])
    land(quiet, "second", [3], bad=[1, 2])
    assert sorted(letters(quiet).values()) == [1, 2]
    quiet.commit(insert(9, n=9))
    quiet.apply()
    assert sorted(letters(quiet).values()) == [1, 2], "also after what the load has cleared was removed"


def test_a_load_of_a_part_leaves_those_of_the_load_before_it(quiet: Quiet) -> None:
    mine = DeadLetterStore(quiet.settings.log.path, THINGS)
    mine.before_load("part", whole=False, now="first", seq=quiet.applied_position.seq)
    mine.write_load_rejects("part", quiet.applied_position.seq, [bundle(2)])
    cursor = quiet.applied_position
    quiet.table.merge_load(SHOP, [], cursor, replace(cursor, load="part"), keys=[])
    assert letters(quiet) == {-1: 3, -2: 2}


def test_what_builds_on_such_a_row_waits_and_what_replaces_it_clears_it(quiet: Quiet) -> None:
    quiet.commit(update(3, unchanged=("big",), n=1))
    quiet.apply()
    assert (letters(quiet), quiet.ns()) == ({-1: 3, 1: 3}, {1: 0, 2: 0})
    quiet.commit(update(3, n=2))
    quiet.apply()
    assert (letters(quiet), quiet.ns()) == ({}, {1: 0, 2: 0, 3: 2})


def test_a_load_that_adds_to_what_is_there_leaves_letters_that_have_passed(quiet: Quiet) -> None:
    mine, seq = DeadLetterStore(quiet.settings.log.path, THINGS), quiet.applied_position.seq
    for load in ("second", "third"):  # the first of them came to nothing
        mine.before_load(load, whole=False, now="first", seq=seq)
        mine.supersede_by_load(load, SHOP, seq)
        mine.write_load_rejects(load, seq, [bundle(2)])
    assert (mine.count(seq, "first"), mine.superseded(seq, "first")) == (1, frozenset())
    assert (mine.count(seq, "third"), mine.superseded(seq, "third")) == (2, frozenset([-1]))
    mine.recover("third")
    assert (mine.count(seq), mine.superseded(seq)) == (2, frozenset([-1]))
    assert [one.changes.column("id").to_pylist() for one in mine.read_open_keys(seq)] == [[2]], (
        "only what was not brought again"
    )


def test_such_a_row_that_is_deleted_is_no_letter_any_more(quiet: Quiet) -> None:
    quiet.commit(delete(3))
    quiet.apply()
    assert letters(quiet) == {}


def test_one_is_dropped_by_its_number(quiet: Quiet, capsys: pytest.CaptureFixture[str]) -> None:
    listing = ["dead-letters", str(quiet.file), "list", "public.things"]
    assert main(listing) == ExitCode.OK
    assert "seq -1 · read at 0/1000" in capsys.readouterr().out
    assert main([*listing, "--forget", "--seq", "-1"]) == ExitCode.OK
    assert letters(quiet) == {}
    land(quiet, "second", [1, 2], bad=[3])
    assert letters(quiet) == {-2: 3}, "a number that was dropped is not given again"


def test_a_load_that_left_rows_out_is_no_base_of_a_rebuild(quiet: Quiet, capsys: pytest.CaptureFixture[str]) -> None:
    quiet.keep("first")
    quiet.commit(update(3, n=2))
    quiet.apply()
    rebuild = ["rebuild", str(quiet.file), "public.things"]
    assert main([*rebuild, "--from-version", "0"]) == ExitCode.CONFIG
    assert "dead letters" in capsys.readouterr().err
    assert main(rebuild) == ExitCode.OK, "what was missing has come since"
