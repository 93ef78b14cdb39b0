"""Dead letters with a real lake table: stored before the commit, counted after it, the same however the log is cut.

`make engines` runs this with Spark's connectors too: every engine must store the same dead letters. No task can read an
Iceberg table.
"""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pytest

from tailrace.deadletters.step_file import CAUSE_CODE
from tailrace.deadletters.store import DeadLetterStore, tables_with_dead_letters
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
    quiet = Quiet(folder, on_bad_row=on_bad_row, table_format=FORMAT)
    quiet.load([{"id": key, "name": f"n{key}", "big": "x" * 50, "n": 0} for key in range(1, 6)])
    return quiet


def open_codes(quiet: Quiet) -> dict[int, str]:
    """Return the cause code of each open dead letter, by `_seq`."""
    batches = DeadLetterStore(quiet.settings.log.path, THINGS).read_open(quiet.applied_position.seq)
    return {
        seq: code
        for bundle in batches
        for seq, code in zip(bundle.seqs, bundle.rows.column(CAUSE_CODE).to_pylist(), strict=True)
    }


def test_changes_that_the_table_cannot_take_become_dead_letters_and_the_rest_is_applied(quiet: Quiet) -> None:
    quiet.commit(update(1, unfit=BAD), update(2, n=2), insert(9, unfit=BAD))
    (outcome,) = quiet.apply()
    assert (outcome.error, outcome.dead_letters) == (None, 2)
    assert (quiet.ns(), open_codes(quiet)) == ({1: 0, 2: 2, 3: 0, 4: 0, 5: 0}, {1: "value-unfit", 3: "value-unfit"})
    assert count_open_dead_letters(quiet.settings.log.path, THINGS, quiet.applied_position) == 2
    assert tables_with_dead_letters(quiet.settings.log.path) == [THINGS]


def test_a_mirror_with_soft_delete_and_metadata_has_dead_letters_too(tmp_path: Path) -> None:
    quiet = Quiet(tmp_path, on_bad_row="dead-letter", spec="soft_delete: true, metadata: [_seq]", table_format=FORMAT)
    quiet.load([{"id": key, "name": f"n{key}", "big": "x" * 50, "n": 0} for key in range(1, 4)])
    quiet.commit(update(1, unfit=BAD), update(2, unchanged=BIG, n=2), delete(3), update(9, unchanged=BIG))
    assert quiet.apply()[-1].error is None
    assert open_codes(quiet) == {1: "value-unfit", 4: "base-row-missing"}
    assert {key: (row["n"], row["big"], row["_deleted"]) for key, row in quiet.rows().items()} == {
        1: (0, "x" * 50, False),
        2: (2, "x" * 50, False),
        3: (0, "x" * 50, True),
    }
    if IS_ICEBERG:  # a job corrects rows there: see `test_iceberg_letters.py`
        return
    mended = pa.Table.from_pylist([{"id": 1, "name": "n1", "big": "y", "n": 7}], pa.schema(SHOP.row_fields()))
    assert quiet.table.upsert_rows(SHOP, mended, quiet.applied_position).committed
    assert (quiet.rows()[1]["n"], quiet.rows()[1]["_deleted"]) == (7, False)


def loaded_with(folder: Path, spec: str, on_bad_row: str = "dead-letter") -> Quiet:
    quiet = Quiet(folder, on_bad_row=on_bad_row, spec=spec, table_format=FORMAT)
    quiet.load([{"id": key, "name": f"n{key}", "big": "x" * 50, "n": 0} for key in range(1, 4)])
    return quiet


def superseded_seqs(quiet: Quiet) -> set[int]:
    return {*DeadLetterStore(quiet.settings.log.path, THINGS).superseded(quiet.applied_position.seq)}


@pytest.mark.parametrize("spec", ["mode: history", "mode: append"])
def test_a_table_that_keeps_the_past_stops_unless_dead_letters_are_enabled(tmp_path: Path, spec: str) -> None:
    quiet = loaded_with(tmp_path, spec, on_bad_row="stop")
    quiet.commit(insert(9, unfit=BAD))
    assert isinstance(quiet.apply()[-1].error, ValueUnfit)


def test_in_append_mode_no_later_change_clears_a_dead_letter(tmp_path: Path) -> None:
    quiet = loaded_with(tmp_path, "mode: append")
    quiet.commit(update(1, unfit=BAD), update(2, unchanged=BIG, n=2), delete(9))
    (outcome,) = quiet.apply()
    assert (outcome.error, outcome.dead_letters, open_codes(quiet)) == (None, 1, {1: "value-unfit"})
    quiet.commit(update(1, n=7), delete(1), truncate())
    assert quiet.apply()[-1].error is None
    assert open_codes(quiet) == {1: "value-unfit"}, "later changes do not contain the rejected one"
    content = sorted((row["_seq"], row["_op"], row["n"]) for row in quiet.content() if row["_op"] != "read")
    assert content == [
        (2, "update", 2),
        (3, "delete", None),
        (4, "update", 7),
        (5, "delete", None),
        (6, "truncate", None),
    ]


def versions(quiet: Quiet, key: int) -> list[tuple[int | None, int, bool]]:
    """Return the versions of one row: value, `_seq`, and whether it is current."""
    rows = sorted((row["_seq"], row["n"], row["_current"]) for row in quiet.content() if row["id"] == key)
    return [(n, seq, current) for seq, n, current in rows]


def test_in_history_mode_a_missing_version_keeps_its_dead_letter_when_later_versions_exist(tmp_path: Path) -> None:
    quiet = loaded_with(tmp_path, "mode: history")
    quiet.commit(update(1, unfit=BAD), update(2, n=2))
    assert quiet.apply()[-1].error is None
    assert (open_codes(quiet), superseded_seqs(quiet)) == ({1: "value-unfit"}, set())
    assert versions(quiet, 1) == [(0, 0, True)], "the row stays as it was"
    quiet.commit(update(1, unchanged=BIG, n=3))
    quiet.apply()
    assert open_codes(quiet) == {1: "value-unfit", 3: "base-row-missing"}, "a change that builds on it is rejected too"
    quiet.commit(update(1, n=4))
    quiet.apply()
    assert [(n, current) for n, _, current in versions(quiet, 1)] == [(0, False), (4, True)]
    assert (open_codes(quiet), superseded_seqs(quiet)) == ({1: "value-unfit", 3: "base-row-missing"}, {1, 3})
    quiet.commit(update(1, unchanged=BIG, n=5), update(77, unchanged=BIG, n=5))
    quiet.commit(truncate())
    quiet.apply()
    assert [n for n, _, _ in versions(quiet, 1)] == [0, 4, 5], "and the row has later versions"
    assert (open_codes(quiet)[6], superseded_seqs(quiet)) == ("base-row-missing", {1, 3, 6})
    assert not any(row["_current"] for row in quiet.content())


def test_a_dead_letter_of_a_keyless_table_is_open_while_its_row_exists(tmp_path: Path) -> None:
    quiet = Quiet(tmp_path, on_bad_row="dead-letter", table_format=FORMAT)
    quiet.load([{"a": 1, "b": "x"}, {"a": 1, "b": None}], schema=KEYLESS)
    quiet.commit(
        insert({"a": 2}, unfit=("b",)), update({"a": 1}, before={"a": 1, "b": "x"}, unfit=("b",)), schema=KEYLESS
    )
    assert quiet.apply()[-1].error is None
    assert (open_codes(quiet), quiet.content()) == ({1: "value-unfit", 2: "value-unfit"}, [{"a": 1, "b": None}])
    mended = update({"a": 1}, b="y", before={"a": 1, "b": None}, unfit=("_before.b",))
    quiet.commit(mended, delete({"a": 2}, unfit=("b",)), schema=KEYLESS)
    assert quiet.apply()[-1].error is None
    assert (open_codes(quiet), sorted(quiet.content(), key=str)) == ({}, [{"a": 1, "b": "y"}, {"a": 1, "b": None}])


def test_a_partial_change_after_a_rejected_one_in_the_same_batch_is_rejected_too(quiet: Quiet) -> None:
    """Folded together, the two would make a whole row; in two batches they would not. The cut must not decide."""
    quiet.commit(update(1, unfit=BAD), update(1, unchanged=BIG, n=7), update(2, unfit=BAD), update(2, n=2))
    (outcome,) = quiet.apply()
    assert (outcome.error, open_codes(quiet)) == (None, {1: "value-unfit", 2: "base-row-missing"})
    assert (quiet.ns()[1], quiet.ns()[2]) == (0, 2)


def test_a_row_whose_rule_failed_is_a_dead_letter_with_every_engine(quiet: Quiet) -> None:
    quiet.commit(insert(9, unfit=BAD, unfit_text=rule_failure_text("hash", "no key")))
    assert quiet.apply()[-1].error is None
    assert open_codes(quiet) == {1: "transform-failed"}


def test_with_soft_delete_a_truncate_marks_rows_in_their_last_state(tmp_path: Path) -> None:
    quiet = Quiet(tmp_path, on_bad_row="dead-letter", spec="soft_delete: true", table_format=FORMAT)
    quiet.load([{"id": 1, "name": "n1", "big": "x", "n": 0}])
    quiet.commit(update(1, n=1), insert(2, n=2), update(2, unfit=BAD), truncate(), insert(3, n=3), insert(4, unfit=BAD))
    assert quiet.apply()[-1].error is None
    assert open_codes(quiet) == {6: "value-unfit"}
    assert {key: (row["n"], row["_deleted"]) for key, row in quiet.rows().items()} == {
        1: (1, True),
        2: (2, True),
        3: (3, False),
    }


def test_without_rejected_changes_nothing_is_stored(quiet: Quiet) -> None:
    quiet.commit(update(1, unchanged=BIG, n=1), insert(9))
    quiet.apply()
    assert not (quiet.settings.log.path / "dead").exists()


def test_dead_letters_stay_open_across_batches_until_their_rows_are_replaced(quiet: Quiet) -> None:
    quiet.commit(update(1, unfit=BAD), update(2, unfit=BAD))
    quiet.apply()
    quiet.commit(update(1, unchanged=BIG, n=7), update(3, n=3))
    quiet.apply()
    assert open_codes(quiet) == {1: "value-unfit", 2: "value-unfit", 3: "base-row-missing"}
    quiet.commit(update(1, n=8), delete(2))
    quiet.apply()
    assert (open_codes(quiet), quiet.ns()) == ({}, {1: 8, 3: 3, 4: 0, 5: 0})
    assert not DeadLetterStore(quiet.settings.log.path, THINGS).has_any, "no file is left to list"


def test_a_partial_change_without_its_row_is_rejected_and_never_filled_with_nulls(quiet: Quiet) -> None:
    quiet.commit(
        update(77, unchanged=BIG, n=7),
        *move(78, 79, unchanged=BIG),
        update(1, unchanged=BIG, n=1),
        arrival(80, unchanged=BIG),
    )
    quiet.apply()
    assert open_codes(quiet) == dict.fromkeys((1, 3, 5), "base-row-missing")
    assert quiet.ns() == {1: 1, 2: 0, 3: 0, 4: 0, 5: 0}


def test_by_default_the_table_stops(tmp_path: Path) -> None:
    quiet = loaded(tmp_path, on_bad_row="stop")
    quiet.commit(update(1, unfit=BAD))
    (outcome,) = quiet.apply()
    assert isinstance(outcome.error, ValueUnfit)
    assert not (quiet.settings.log.path / "dead").exists()


def test_with_on_bad_row_stop_no_change_builds_on_an_open_dead_letter(quiet: Quiet) -> None:
    quiet.commit(update(1, unfit=BAD))
    quiet.apply()
    quiet.file.write_text(quiet.file.read_text().replace("dead-letter", "stop"))
    quiet.commit(update(1, unchanged=BIG, n=1))
    (outcome,) = quiet.apply()
    assert isinstance(outcome.error, BaseRowMissing)
    assert outcome.error.hint == dead_letters.STOPPED_HINT, "a stopped table runs no replay"
    assert open_codes(quiet) == {1: "value-unfit"}


def test_a_truncate_clears_dead_letters_whose_key_does_not_fit(quiet: Quiet) -> None:
    quiet.commit(insert(9, unfit=("id",)), update(1, unfit=BAD))
    quiet.apply()
    assert list(open_codes(quiet)) == [1, 2]
    quiet.commit(truncate(), insert(3, n=3))
    quiet.apply()
    assert (open_codes(quiet), quiet.ns()) == ({}, {3: 3})


def test_a_list_reads_again_when_dead_letters_are_removed_meanwhile(quiet: Quiet) -> None:
    quiet.commit(update(1, unfit=BAD))
    quiet.apply()
    quiet.commit(update(2, unfit=BAD))
    quiet.apply()
    store = DeadLetterStore(quiet.settings.log.path, THINGS)
    reading = store._read(quiet.applied_position.seq, None, None)
    next(reading)
    quiet.commit(update(1, n=1), update(2, n=1))
    quiet.apply()
    with pytest.raises(FileNotFoundError):
        next(reading)
    assert store.read_open(quiet.applied_position.seq) == []


@not_spark  # its tasks run in other processes, without the patched limit
def test_too_many_dead_letters_stop_the_table(quiet: Quiet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "DEAD_LETTERS_MAX", 2)
    quiet.commit(update(1, unfit=BAD), update(2, unfit=BAD))
    quiet.apply()
    quiet.commit(update(3, unfit=BAD))
    (outcome,) = quiet.apply()
    assert isinstance(outcome.error, DeadLettersFull)
    assert len(open_codes(quiet)) == 2


def test_an_unreadable_dead_letter_stops_its_table(quiet: Quiet) -> None:
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


def content(quiet: Quiet) -> tuple[object, ...]:
    return quiet.rows(), sorted(open_codes(quiet))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    quiet = loaded(tmp_path_factory.mktemp("expected"))
    for rows in STORY:
        quiet.commit(*rows)
    quiet.apply()
    return content(quiet)


def test_dead_letters_do_not_depend_on_how_the_log_is_cut_into_batches(
    tmp_path: Path, expected: tuple[object, ...]
) -> None:
    assert expected[1] == [6, 9, 10, 13], "with every engine"
    chance = random.Random(6)
    for number in range(1 if IS_SPARK else 4):
        quiet = loaded(tmp_path / str(number))
        for rows in STORY:
            quiet.commit(*rows)
            if chance.random() < 0.6:
                quiet.apply()
        quiet.apply()
        assert content(quiet) == expected


@pytest.mark.slow
@not_spark  # `tests/crash` kills Spark's connectors
@pytest.mark.parametrize("failpoint", ["letters.written", "table.after_commit", "letters.tidied"])
def test_no_dead_letter_is_lost_or_doubled_wherever_the_process_is_killed(
    tmp_path: Path, expected: tuple[object, ...], failpoint: str
) -> None:
    quiet = loaded(tmp_path / "quiet")
    for part in (STORY[:3], STORY[3:]):  # the second try has more changes than the one that died
        for rows in part:
            quiet.commit(*rows)
        assert quiet.apply_killed(failpoint, tmp_path / "hits") == -9
    quiet.apply()
    assert content(quiet) == expected
