"""Rows that a load rejects: dead letters of the table after the load commit, and not before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tailrace.cli.main import main
from tailrace.deadletters.step_file import DeadLetterBatch
from tailrace.deadletters.store import DeadLetterStore
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
    """Return rows as a reader yields them, with the rows of some keys unfit."""
    cells = [NAN if row["id"] in bad else None for row in rows]
    (batch,) = record_batches(SHOP, rows)
    return [(batch, pa.array(cells, change.UNFIT_TYPE))]


def rejects_of(*rows: dict[str, Any], bad: tuple[int, ...] = ()) -> tuple[LoadRejects, list[dict[str, Any]]]:
    rejects = LoadRejects(SHOP, TableSpec(), LoadOrigin(seq=0, position="0/0", read_at=7), SEEN)
    return rejects, [row for batch in rejects.without_rejects(marked(*rows, bad=bad)) for row in batch.to_pylist()]


def bundle(*keys: int) -> DeadLetterBatch:
    rejects, _ = rejects_of(*({"id": key, "name": "n"} for key in keys), bad=keys)
    return DeadLetterBatch(schema=SHOP, rows=rejects.dead_letters)


@pytest.fixture
def quiet(tmp_path: Path) -> Quiet:
    """A loaded table; the load rejected row 3."""
    quiet = Quiet(tmp_path, on_bad_row="dead-letter")
    quiet.diary.commit()
    load(quiet, "first", [1, 2], bad=[3])
    return quiet


def load(quiet: Quiet, name: str, keys: list[int], bad: list[int]) -> None:
    """Commit a load of some rows that rejected others."""
    quiet.reload([{"id": key, "n": 0} for key in keys], name, dead_letters=[bundle(*bad)] if bad else [])


def open_keys(quiet: Quiet) -> dict[int, int]:
    """Return the key of each open dead letter, by its number."""
    batches = DeadLetterStore(quiet.settings.log.path, THINGS).read_open(
        quiet.applied_position.seq, quiet.applied_position.load
    )
    rows = [row for one in batches for row in one.changes.to_pylist()]
    return {row[change.SEQ]: row["id"] for row in rows}


def test_a_row_is_either_staged_or_a_dead_letter_with_everything_that_was_read() -> None:
    rejects, rows = rejects_of({"id": 1, "n": 1}, {"id": 2, "name": "kept"}, {"id": 3, "n": 3}, bad=(2,))
    assert [row["id"] for row in rows] == [1, 3]
    (letter,) = rejects.dead_letters.to_pylist()
    assert (letter["id"], letter["name"], letter["n"], letter[change.UNFIT]) == (2, "kept", None, NAN)
    assert (letter[change.OP], letter[change.POSITION], letter["_cause_code"]) == ("read", str(SEEN), "value-unfit")
    assert "column=n" in letter["_cause"]


def test_a_row_whose_value_cannot_be_a_partition_is_a_dead_letter() -> None:
    rejects = LoadRejects(SHOP, TableSpec(partition_by=("name",)), LoadOrigin(seq=0, position="0/0", read_at=7), SEEN)
    rows = marked({"id": 1, "name": "a"}, {"id": 2, "name": ""})
    assert [row["id"] for batch in rejects.without_rejects(rows) for row in batch.to_pylist()] == [1]
    assert "a value cannot be a partition value" in rejects.dead_letters.column("_cause")[0].as_py()


def test_too_many_dead_letters_of_a_load_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_dead_letters, "DEAD_LETTERS_MAX", 1)
    with pytest.raises(DeadLettersFull, match="the load has too many dead letters"):
        rejects_of({"id": 1}, {"id": 2}, bad=(1, 2))


def test_the_dead_letters_of_a_chunk_are_read_back(tmp_path: Path) -> None:
    store = LoadStore(tmp_path)
    store.folder("abc").mkdir(parents=True)
    store.store_dead_letters("abc", 4, SHOP, bundle(7).rows)
    staged = StagedChunk(chunk=4, files=(), rows=0, bytes=0, seconds=0.0, seen_until=SEEN, dead_letters=1)
    store.record_chunk("abc", staged)
    assert store.staged_chunks("abc") == {4: staged}
    (found,) = store.dead_letters("abc", [staged])
    assert (found.schema, found.changes.column("id").to_pylist()) == (SHOP, [7])
    old = {name: value for name, value in staged.to_json().items() if name != "letters"}
    assert StagedChunk.from_json(old).dead_letters == 0, "as older releases recorded it"


def test_dead_letters_of_a_load_count_once_the_load_is_committed(quiet: Quiet) -> None:
    assert open_keys(quiet) == {-1: 3}
    store = DeadLetterStore(quiet.settings.log.path, THINGS)
    store.before_load("second", whole=True, now="first", seq=quiet.applied_position.seq)
    store.write_load_rejects("second", quiet.applied_position.seq, [bundle(1, 2)])
    assert open_keys(quiet) == {-1: 3}, "the load is not committed"
    quiet.commit(insert(9, n=9))
    quiet.apply()
    assert (open_keys(quiet), quiet.ns()) == ({-1: 3}, {1: 0, 2: 0, 9: 9}), "and never was"
    load(quiet, "third", [9], bad=[1])
    assert open_keys(quiet) == {-2: 1}, "a full load clears earlier dead letters"


def test_a_load_commit_that_is_tried_again_leaves_each_dead_letter_once(quiet: Quiet) -> None:
    store = DeadLetterStore(quiet.settings.log.path, THINGS)
    store.before_load("second", whole=True, now="first", seq=quiet.applied_position.seq)
    store.write_load_rejects("second", quiet.applied_position.seq, [bundle(1, 2)])
    load(quiet, "second", [3], bad=[1, 2])
    assert sorted(open_keys(quiet).values()) == [1, 2]
    quiet.commit(insert(9, n=9))
    quiet.apply()
    assert sorted(open_keys(quiet).values()) == [1, 2], "also after the cleared dead letters were removed"


def test_a_partial_load_leaves_the_dead_letters_of_the_load_before_it(quiet: Quiet) -> None:
    store = DeadLetterStore(quiet.settings.log.path, THINGS)
    store.before_load("part", whole=False, now="first", seq=quiet.applied_position.seq)
    store.write_load_rejects("part", quiet.applied_position.seq, [bundle(2)])
    applied_position = quiet.applied_position
    quiet.table.merge_load(SHOP, [], applied_position, replace(applied_position, load="part"), keys=[])
    assert open_keys(quiet) == {-1: 3, -2: 2}


def test_a_partial_change_of_a_rejected_row_is_rejected_and_a_whole_change_clears_it(quiet: Quiet) -> None:
    quiet.commit(update(3, unchanged=("big",), n=1))
    quiet.apply()
    assert (open_keys(quiet), quiet.ns()) == ({-1: 3, 1: 3}, {1: 0, 2: 0})
    quiet.commit(update(3, n=2))
    quiet.apply()
    assert (open_keys(quiet), quiet.ns()) == ({}, {1: 0, 2: 0, 3: 2})


def test_a_load_that_adds_to_the_table_marks_earlier_dead_letters_as_superseded(quiet: Quiet) -> None:
    store, seq = DeadLetterStore(quiet.settings.log.path, THINGS), quiet.applied_position.seq
    for load in ("second", "third"):  # the first of them fails
        store.before_load(load, whole=False, now="first", seq=seq)
        store.supersede_by_load(load, SHOP, seq)
        store.write_load_rejects(load, seq, [bundle(2)])
    assert (store.count(seq, "first"), store.superseded(seq, "first")) == (1, frozenset())
    assert (store.count(seq, "third"), store.superseded(seq, "third")) == (2, frozenset([-1]))
    store.recover("third")
    assert (store.count(seq), store.superseded(seq)) == (2, frozenset([-1]))
    assert [one.changes.column("id").to_pylist() for one in store.read_open_keys(seq)] == [[2]], (
        "only rows that the load did not read again"
    )


def test_deleting_a_rejected_row_closes_its_dead_letter(quiet: Quiet) -> None:
    quiet.commit(delete(3))
    quiet.apply()
    assert open_keys(quiet) == {}


def test_a_dead_letter_of_a_load_is_dropped_by_its_number(quiet: Quiet, capsys: pytest.CaptureFixture[str]) -> None:
    listing = ["dead-letters", str(quiet.file), "list", "public.things"]
    assert main(listing) == ExitCode.OK
    assert "seq -1 · read at 0/1000" in capsys.readouterr().out
    assert main([*listing, "--forget", "--seq", "-1"]) == ExitCode.OK
    assert open_keys(quiet) == {}
    load(quiet, "second", [1, 2], bad=[3])
    assert open_keys(quiet) == {-2: 3}, "the number of a dropped dead letter is not used again"


def test_a_load_with_open_dead_letters_is_no_base_of_a_rebuild(
    quiet: Quiet, capsys: pytest.CaptureFixture[str]
) -> None:
    quiet.keep("first")
    quiet.commit(update(3, n=2))
    quiet.apply()
    rebuild = ["rebuild", str(quiet.file), "public.things"]
    assert main([*rebuild, "--from-version", "0"]) == ExitCode.CONFIG
    assert "dead letters" in capsys.readouterr().err
    assert main(rebuild) == ExitCode.OK, "the missing row has been applied since"
