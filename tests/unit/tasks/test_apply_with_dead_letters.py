"""Letters beside a real lake table: written before the commit, counted once it is made, the same however it is cut.

`make engines` runs this with Spark's connectors, too: whoever writes the table, the letters are the same. No task can
say what an Iceberg table holds.
"""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pytest

from tailrace.deadletters.store import CAUSE_CODE, DeadLetterStore, tables_with_dead_letters
from tailrace.errors import BaseRowMissing, DeadLettersFull, LogCorrupt, ValueUnfit
from tailrace.model.change import rule_failure_text
from tailrace.pipeline.status import count_open_dead_letters
from tailrace.tasks import dead_letters
from tests.support.changes import KEYLESS, SHOP, Change, arrival, delete, insert, move, truncate, update
from tests.support.engines import FORMAT, IS_ICEBERG, IS_SPARK, not_spark
from tests.support.quiet import THINGS, Quiet

BIG, BAD = ("big",), ("n",)


@pytest.fixture
def quiet(tmp_path: Path) -> Quiet:
    return loaded(tmp_path)


def loaded(folder: Path, on_bad_row: str = "dead-letter") -> Quiet:
    made = Quiet(folder, on_bad_row=on_bad_row, table_format=FORMAT)
    made.load([{"id": key, "name": f"n{key}", "big": "x" * 50, "n": 0} for key in range(1, 6)])
    return made


def letters(quiet: Quiet) -> dict[int, str]:
    """The open ones: the code of each, by `_seq`."""
    found = DeadLetterStore(quiet.settings.log.path, THINGS).read_open(quiet.applied_position.seq)
    return {
        seq: code
        for bundle in found
        for seq, code in zip(bundle.seqs, bundle.rows.column(CAUSE_CODE).to_pylist(), strict=True)
    }


def test_the_table_goes_on_without_what_it_cannot_take(quiet: Quiet) -> None:
    quiet.commit(update(1, unfit=BAD), update(2, n=2), insert(9, unfit=BAD))
    (outcome,) = quiet.apply()
    assert (outcome.error, outcome.dead_letters) == (None, 2)
    assert (quiet.ns(), letters(quiet)) == ({1: 0, 2: 2, 3: 0, 4: 0, 5: 0}, {1: "value-unfit", 3: "value-unfit"})
    assert count_open_dead_letters(quiet.settings.log.path, THINGS, quiet.applied_position) == 2
    assert tables_with_dead_letters(quiet.settings.log.path) == [THINGS]


def test_a_mirror_with_marks_and_metadata_goes_on_too(tmp_path: Path) -> None:
    made = Quiet(tmp_path, on_bad_row="dead-letter", spec="soft_delete: true, metadata: [_seq]", table_format=FORMAT)
    made.load([{"id": key, "name": f"n{key}", "big": "x" * 50, "n": 0} for key in range(1, 4)])
    made.commit(update(1, unfit=BAD), update(2, unchanged=BIG, n=2), delete(3), update(9, unchanged=BIG))
    assert made.apply()[-1].error is None
    assert letters(made) == {1: "value-unfit", 4: "base-row-missing"}
    assert {key: (row["n"], row["big"], row["_deleted"]) for key, row in made.rows().items()} == {
        1: (0, "x" * 50, False),
        2: (2, "x" * 50, False),
        3: (0, "x" * 50, True),
    }
    if IS_ICEBERG:  # rows are put right by a job: see `test_iceberg_letters.py`
        return
    mended = pa.Table.from_pylist([{"id": 1, "name": "n1", "big": "y", "n": 7}], pa.schema(SHOP.row_fields()))
    assert made.table.upsert_rows(SHOP, mended, made.applied_position).committed
    assert (made.rows()[1]["n"], made.rows()[1]["_deleted"]) == (7, False)


def made_as(folder: Path, form: str, on_bad_row: str = "dead-letter") -> Quiet:
    made = Quiet(folder, on_bad_row=on_bad_row, spec=form, table_format=FORMAT)
    made.load([{"id": key, "name": f"n{key}", "big": "x" * 50, "n": 0} for key in range(1, 4)])
    return made


def passed(quiet: Quiet) -> set[int]:
    return {*DeadLetterStore(quiet.settings.log.path, THINGS).superseded(quiet.applied_position.seq)}


@pytest.mark.parametrize("form", ["mode: history", "mode: append"])
def test_a_table_that_keeps_the_past_stops_unless_letters_are_wished_for(tmp_path: Path, form: str) -> None:
    made = made_as(tmp_path, form, on_bad_row="stop")
    made.commit(insert(9, unfit=BAD))
    assert isinstance(made.apply()[-1].error, ValueUnfit)


def test_a_change_is_left_out_of_a_table_of_changes_and_nothing_makes_up_for_it(tmp_path: Path) -> None:
    made = made_as(tmp_path, "mode: append")
    made.commit(update(1, unfit=BAD), update(2, unchanged=BIG, n=2), delete(9))
    (outcome,) = made.apply()
    assert (outcome.error, outcome.dead_letters, letters(made)) == (None, 1, {1: "value-unfit"})
    made.commit(update(1, n=7), delete(1), truncate())
    assert made.apply()[-1].error is None
    assert letters(made) == {1: "value-unfit"}, "what the change was is not in what came later"
    told = sorted((row["_seq"], row["_op"], row["n"]) for row in made.content() if row["_op"] != "read")
    assert told == [(2, "update", 2), (3, "delete", None), (4, "update", 7), (5, "delete", None), (6, "truncate", None)]


def versions(quiet: Quiet, key: int) -> list[tuple[int | None, int, bool]]:
    """Of one row: its values, the changes that brought them, and which is current."""
    found = sorted((row["_seq"], row["n"], row["_current"]) for row in quiet.content() if row["id"] == key)
    return [(n, seq, current) for seq, n, current in found]


def test_a_version_that_is_missing_keeps_its_letter_when_the_next_one_has_come(tmp_path: Path) -> None:
    made = made_as(tmp_path, "mode: history")
    made.commit(update(1, unfit=BAD), update(2, n=2))
    assert made.apply()[-1].error is None
    assert (letters(made), passed(made)) == ({1: "value-unfit"}, set())
    assert versions(made, 1) == [(0, 0, True)], "the row stays as it was"
    made.commit(update(1, unchanged=BIG, n=3))
    made.apply()
    assert letters(made) == {1: "value-unfit", 3: "base-row-missing"}, "what builds on it is set aside too"
    made.commit(update(1, n=4))
    made.apply()
    assert [(n, current) for n, _, current in versions(made, 1)] == [(0, False), (4, True)]
    assert (letters(made), passed(made)) == ({1: "value-unfit", 3: "base-row-missing"}, {1, 3})
    made.commit(update(1, unchanged=BIG, n=5), update(77, unchanged=BIG, n=5))
    made.commit(truncate())
    made.apply()
    assert [n for n, _, _ in versions(made, 1)] == [0, 4, 5], "and the row has gone on"
    assert (letters(made)[6], passed(made)) == ("base-row-missing", {1, 3, 6})
    assert not any(row["_current"] for row in made.content())


def test_a_row_that_does_not_fit_is_a_letter_of_a_table_without_a_key_for_as_long_as_it_is_there(
    tmp_path: Path,
) -> None:
    made = Quiet(tmp_path, on_bad_row="dead-letter", table_format=FORMAT)
    made.load([{"a": 1, "b": "x"}, {"a": 1, "b": None}], schema=KEYLESS)
    made.commit(
        insert({"a": 2}, unfit=("b",)), update({"a": 1}, before={"a": 1, "b": "x"}, unfit=("b",)), schema=KEYLESS
    )
    assert made.apply()[-1].error is None
    assert (letters(made), made.content()) == ({1: "value-unfit", 2: "value-unfit"}, [{"a": 1, "b": None}])
    mended = update({"a": 1}, b="y", before={"a": 1, "b": None}, unfit=("_before.b",))
    made.commit(mended, delete({"a": 2}, unfit=("b",)), schema=KEYLESS)
    assert made.apply()[-1].error is None
    assert (letters(made), sorted(made.content(), key=str)) == ({}, [{"a": 1, "b": "y"}, {"a": 1, "b": None}])


def test_what_a_partial_change_in_the_same_batch_leaves_of_a_bad_one_is_set_aside_with_it(quiet: Quiet) -> None:
    """Folded together the two would make a whole row; in two batches they would not, and the cut must not decide."""
    quiet.commit(update(1, unfit=BAD), update(1, unchanged=BIG, n=7), update(2, unfit=BAD), update(2, n=2))
    (outcome,) = quiet.apply()
    assert (outcome.error, letters(quiet)) == (None, {1: "value-unfit", 2: "base-row-missing"})
    assert (quiet.ns()[1], quiet.ns()[2]) == (0, 2)


def test_a_row_that_a_rule_failed_at_is_set_aside_by_every_engine(quiet: Quiet) -> None:
    quiet.commit(insert(9, unfit=BAD, unfit_text=rule_failure_text("hash", "no key")))
    assert quiet.apply()[-1].error is None
    assert letters(quiet) == {1: "transform-failed"}


def test_what_a_truncate_takes_away_stays_marked_as_it_was_last(tmp_path: Path) -> None:
    made = Quiet(tmp_path, on_bad_row="dead-letter", spec="soft_delete: true", table_format=FORMAT)
    made.load([{"id": 1, "name": "n1", "big": "x", "n": 0}])
    made.commit(update(1, n=1), insert(2, n=2), update(2, unfit=BAD), truncate(), insert(3, n=3), insert(4, unfit=BAD))
    assert made.apply()[-1].error is None
    assert letters(made) == {6: "value-unfit"}
    assert {key: (row["n"], row["_deleted"]) for key, row in made.rows().items()} == {
        1: (1, True),
        2: (2, True),
        3: (3, False),
    }


def test_while_nothing_is_wrong_nothing_is_written(quiet: Quiet) -> None:
    quiet.commit(update(1, unchanged=BIG, n=1), insert(9))
    quiet.apply()
    assert not (quiet.settings.log.path / "dead").exists()


def test_letters_outlive_batches_and_go_with_what_replaces_their_rows(quiet: Quiet) -> None:
    quiet.commit(update(1, unfit=BAD), update(2, unfit=BAD))
    quiet.apply()
    quiet.commit(update(1, unchanged=BIG, n=7), update(3, n=3))
    quiet.apply()
    assert letters(quiet) == {1: "value-unfit", 2: "value-unfit", 3: "base-row-missing"}
    quiet.commit(update(1, n=8), delete(2))
    quiet.apply()
    assert (letters(quiet), quiet.ns()) == ({}, {1: 8, 3: 3, 4: 0, 5: 0})
    assert not DeadLetterStore(quiet.settings.log.path, THINGS).has_any, "nothing is left to look at"


def test_a_partial_change_without_its_row_is_set_aside_and_never_nulled(quiet: Quiet) -> None:
    quiet.commit(
        update(77, unchanged=BIG, n=7),
        *move(78, 79, unchanged=BIG),
        update(1, unchanged=BIG, n=1),
        arrival(80, unchanged=BIG),
    )
    quiet.apply()
    assert letters(quiet) == dict.fromkeys((1, 3, 5), "base-row-missing")
    assert quiet.ns() == {1: 1, 2: 0, 3: 0, 4: 0, 5: 0}


def test_the_default_is_to_stop(tmp_path: Path) -> None:
    quiet = loaded(tmp_path, on_bad_row="stop")
    quiet.commit(update(1, unfit=BAD))
    (outcome,) = quiet.apply()
    assert isinstance(outcome.error, ValueUnfit)
    assert not (quiet.settings.log.path / "dead").exists()


def test_with_letters_left_from_before_nothing_builds_on_their_rows(quiet: Quiet) -> None:
    quiet.commit(update(1, unfit=BAD))
    quiet.apply()
    quiet.file.write_text(quiet.file.read_text().replace("dead-letter", "stop"))
    quiet.commit(update(1, unchanged=BIG, n=1))
    (outcome,) = quiet.apply()
    assert isinstance(outcome.error, BaseRowMissing)
    assert "Set `on_bad_row: dead-letter` again" in outcome.error.hint, "no replay is done while the table stands"
    assert letters(quiet) == {1: "value-unfit"}


def test_a_truncate_clears_also_letters_whose_key_does_not_fit(quiet: Quiet) -> None:
    quiet.commit(insert(9, unfit=("id",)), update(1, unfit=BAD))
    quiet.apply()
    assert list(letters(quiet)) == [1, 2]
    quiet.commit(truncate(), insert(3, n=3))
    quiet.apply()
    assert (letters(quiet), quiet.ns()) == ({}, {3: 3})


def test_a_list_beside_whoever_applies_looks_again_at_what_is_removed_meanwhile(quiet: Quiet) -> None:
    quiet.commit(update(1, unfit=BAD))
    quiet.apply()
    quiet.commit(update(2, unfit=BAD))
    quiet.apply()
    found = DeadLetterStore(quiet.settings.log.path, THINGS)
    reading = found._read(quiet.applied_position.seq, None, None)
    next(reading)
    quiet.commit(update(1, n=1), update(2, n=1))
    quiet.apply()
    with pytest.raises(FileNotFoundError):
        next(reading)
    assert found.read_open(quiet.applied_position.seq) == []


@not_spark  # whose tasks know nothing of another limit
def test_too_many_letters_stop_the_table(quiet: Quiet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "DEAD_LETTERS_MAX", 2)
    quiet.commit(update(1, unfit=BAD), update(2, unfit=BAD))
    quiet.apply()
    quiet.commit(update(3, unfit=BAD))
    (outcome,) = quiet.apply()
    assert isinstance(outcome.error, DeadLettersFull)
    assert len(letters(quiet)) == 2


def test_a_letter_that_cannot_be_read_is_said_and_stops_only_its_table(quiet: Quiet) -> None:
    quiet.commit(update(1, unfit=BAD))
    quiet.apply()
    (step,) = (quiet.settings.log.path / "dead").glob("*/*.arrow")
    step.write_bytes(b"nothing of the kind")
    quiet.commit(update(2, n=1))
    (outcome,) = quiet.apply()
    assert isinstance(outcome.error, LogCorrupt)


STORY: list[list[Change]] = [
    [update(1, unfit=BAD), update(2, unchanged=BIG, n=2)],
    [update(1, unchanged=BIG, n=3), insert(6, unfit=BAD)],
    [*move(1, 8, unchanged=BIG, n=4), update(2, unfit=BAD)],
    [update(2, n=5), update(8, unchanged=BIG, n=6), update(3, unfit=BAD)],
    [delete(6), insert(6, n=6), update(3, unchanged=BIG, n=9)],
]


def told(quiet: Quiet) -> tuple[object, ...]:
    return quiet.rows(), sorted(letters(quiet))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    quiet = loaded(tmp_path_factory.mktemp("expected"))
    for rows in STORY:
        quiet.commit(*rows)
    quiet.apply()
    return told(quiet)


def test_however_the_story_is_cut_the_letters_are_the_same(tmp_path: Path, expected: tuple[object, ...]) -> None:
    assert expected[1] == [6, 9, 10, 13], "whoever writes the table"
    chance = random.Random(6)
    for number in range(1 if IS_SPARK else 4):
        quiet = loaded(tmp_path / str(number))
        for rows in STORY:
            quiet.commit(*rows)
            if chance.random() < 0.6:
                quiet.apply()
        quiet.apply()
        assert told(quiet) == expected


@not_spark  # `tests/crash` kills Spark's connectors
@pytest.mark.parametrize("place", ["letters.written", "table.after_commit", "letters.tidied"])
def test_killed_anywhere_no_letter_is_lost_and_none_is_doubled(
    tmp_path: Path, expected: tuple[object, ...], place: str
) -> None:
    quiet = loaded(tmp_path / "quiet")
    for part in (STORY[:3], STORY[3:]):  # the second try has more changes than the one that died
        for rows in part:
            quiet.commit(*rows)
        assert quiet.apply_killed(place, tmp_path / "hits") == -9
    quiet.apply()
    assert told(quiet) == expected
