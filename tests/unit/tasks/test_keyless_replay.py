"""Keyless replay: each change is written once, as the row it would have been, whatever process is killed.

`make engines` runs this with Spark's connectors too.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tailrace.deadletters.step_file import CAUSE, DeadLetterBatch, DeadLetterOrigin
from tailrace.deadletters.store import DeadLetterStore
from tailrace.errors import ForeignWrite, TailraceError
from tailrace.model import change
from tailrace.model.catalogue_facts import CatalogueFacts, ColumnFacts, StorageFacts
from tailrace.model.change import rule_failure_text
from tailrace.model.policies import EvolutionPolicies, EvolutionPolicy
from tailrace.model.position import Lsn
from tailrace.model.schema import Column, TableSchema
from tailrace.tables.compaction_plan import UpkeepPlan
from tailrace.tables.evolve.carry_over import carry_over
from tailrace.tables.evolve.schema_plan import Recast, no_value, plan_evolution
from tailrace.tables.fold.fold import fold
from tailrace.tables.spec import LoadOrigin, TableMode, TableSpec
from tailrace.tasks.apply import advance_table
from tailrace.tasks.keyless_replay import (
    ReplayChangesWork,
    StageReplayChangesWork,
    replay_changes,
    stage_replay_changes,
)
from tailrace.tasks.load_dead_letters import LoadRejects
from tailrace.tasks.work import EvolveWork, Outcome
from tests.support.changes import KEYLESS, changes, delete, insert, record_batches, update
from tests.support.engines import FORMAT, IS_SPARK, not_spark, spark_engine
from tests.support.quiet import FULL, THINGS, Quiet

BAD = ("n",)


def with_facts(schema: TableSchema, numbers: tuple[int, ...], columns_ever: int) -> TableSchema:
    columns = tuple(
        ColumnFacts(number=item, nullable=True, default=None, fast_default=None, definition_version=1)
        for item in numbers
    )
    stored = StorageFacts(relation=schema.relation, name="public.things", file=5, attached=False)
    return replace(schema, facts=CatalogueFacts(columns=columns, storage=(stored,), columns_ever=columns_ever))


def retyped(schema: TableSchema, name: str, kind: pa.DataType) -> TableSchema:
    columns = [
        Column(name=name, source_type=str(kind), type=kind) if item.name == name else item for item in schema.columns
    ]
    return replace(schema, columns=tuple(columns))


def renamed(schema: TableSchema, old: str, new: str) -> TableSchema:
    columns = (replace(item, name=new) if item.name == old else item for item in schema.columns)
    return replace(schema, columns=tuple(columns))


TEXT = retyped(FULL, "n", pa.string())
"""Schema of the table with a column that takes every value."""
PAIRS = with_facts(KEYLESS, (1, 2), 2)
ONES = with_facts(replace(KEYLESS, columns=KEYLESS.columns[:1]), (1,), 2)
"""`PAIRS` and `ONES` are schemas of a keyless table before and after a column was dropped."""


def append_table(folder: Path, spec: str = "mode: append") -> Quiet:
    """Return an `append` table with one loaded row and two changes; the second change is a dead letter."""
    quiet = Quiet(folder, on_bad_row="dead-letter", spec=spec, table_format=FORMAT)
    quiet.load([{"id": 1, "n": 0}], schema=FULL)
    quiet.commit(update(1, name="a", n=1), update(1, name="b", unfit=BAD, unfit_text="NaN"), schema=FULL)
    assert quiet.apply()[-1].error is None
    return quiet


def keyless_table(folder: Path) -> Quiet:
    """Return a keyless table with three dead letters; two of them differ only in the column that is dropped later."""
    quiet = Quiet(folder, on_bad_row="dead-letter", table_format=FORMAT)
    quiet.load([{"a": 1, "b": "x"}], schema=PAIRS)
    rows = [insert({"a": key}, unfit=("b",), unfit_text=f"t{n}") for n, key in enumerate((2, 2, 3))]
    quiet.commit(*rows, insert({"a": 2}, b="y"), schema=PAIRS)
    assert quiet.apply()[-1].error is None
    return quiet


def reshape(quiet: Quiet, schema: TableSchema, *, drop: EvolutionPolicy = EvolutionPolicy.KEEP_NULL) -> None:
    """Recast the table to another schema, as the pipeline does; for a table that keeps the past, as a load does."""
    location, old = quiet.location, quiet.location.open_for_reading().schema()
    assert old is not None
    policies = EvolutionPolicies(drop=drop)
    if location.spec.keeps_past:
        recast: Any = carry_over(location.spec, old, schema, policies, no_value)
    else:
        recast = plan_evolution(old, schema, policies, no_value, location.spec)
    assert isinstance(recast, Recast)
    recast = replace(recast, schema=schema)
    outcome = run(
        advance_table, EvolveWork(table=THINGS, location=location, recast=recast, expected=quiet.applied_position)
    )
    assert outcome.error is None


def run(task: Callable[[Any], Outcome], work: Any) -> Outcome:
    """Run the work with the engine under test."""
    if not IS_SPARK:
        return task(work)
    (outcome,) = spark_engine().run(task, [work])
    return outcome


def work_of(quiet: Quiet) -> ReplayChangesWork:
    schema = quiet.location.open_for_reading().schema()
    assert schema is not None
    return ReplayChangesWork(
        log=quiet.settings.log.path, location=quiet.location, schema=schema, expected=quiet.applied_position
    )


def replay(quiet: Quiet) -> Outcome:
    outcome = run(replay_changes, work_of(quiet))
    assert outcome.error is None
    return outcome


def open_seqs(quiet: Quiet) -> list[int]:
    batches = DeadLetterStore(quiet.settings.log.path, THINGS).read_open(
        quiet.applied_position.seq, quiet.applied_position.load
    )
    return sorted(seq for bundle in batches for seq in bundle.seqs)


def changes_of(quiet: Quiet) -> list[tuple[Any, ...]]:
    """Return the rows of an `append` table, in order."""
    rows = sorted(quiet.content(), key=lambda row: int(row["_seq"]))
    return [(row["_seq"], row["_op"], row["name"], row["n"]) for row in rows]


def ones(quiet: Quiet) -> list[int]:
    return sorted(row["a"] for row in quiet.content())


def test_a_change_that_fits_now_becomes_the_row_it_would_have_been_once(tmp_path: Path) -> None:
    quiet = append_table(tmp_path)
    assert (replay(quiet).rows, open_seqs(quiet)) == (0, [2]), "nothing has changed"
    reshape(quiet, TEXT)
    quiet.commit(update(1, name="c", n="3"), schema=TEXT)
    assert quiet.apply()[-1].error is None
    position = quiet.applied_position
    outcome = replay(quiet)
    assert (outcome.rows, outcome.dead_letters, outcome.version) == (1, 0, quiet.location.open_for_reading().version())
    assert quiet.applied_position == position
    assert changes_of(quiet) == [
        (0, "read", None, "0"),
        (1, "update", "a", "1"),
        (2, "update", "b", "NaN"),
        (3, "update", "c", "3"),
    ]
    first, late = sorted(quiet.content(), key=lambda row: int(row["_seq"]))[1:3]
    assert all(late[name] == first[name] for name in ("_position", "_tx", "_committed_at"))
    assert (replay(quiet).rows, len(changes_of(quiet)), open_seqs(quiet)) == (0, 4, [])
    assert not DeadLetterStore(quiet.settings.log.path, THINGS).has_any


def test_a_change_that_still_does_not_fit_stays_open_with_its_new_cause(tmp_path: Path) -> None:
    quiet = append_table(tmp_path)
    failed = update(2, unfit=BAD, unfit_text=rule_failure_text("hash", "no key"))
    quiet.commit(failed, update(3, name="c", unfit=BAD, unfit_text="NaN"), schema=FULL)
    quiet.apply()
    reshape(quiet, retyped(TEXT, "name", pa.int64()))  # a text value does not fit it
    assert (replay(quiet).rows, open_seqs(quiet)) == (0, [2, 3, 4])
    batches = DeadLetterStore(quiet.settings.log.path, THINGS).read_open(quiet.applied_position.seq)
    causes = dict(
        zip(
            [seq for item in batches for seq in item.seqs],
            [text for item in batches for text in item.rows.column(CAUSE).to_pylist()],
            strict=True,
        )
    )
    assert "no longer holds the change's value" in causes[2]
    assert "column=name" in causes[4]
    assert "a rule could not be applied" in causes[3], "the value was never stored, so no column type helps"
    assert len(changes_of(quiet)) == 2


def test_a_change_with_a_value_for_a_column_only_the_lake_table_has_stays_open(tmp_path: Path) -> None:
    narrow = replace(FULL, columns=FULL.columns[:3])
    narrow = with_facts(narrow, (1, 2, 3), 4)
    quiet = append_table(tmp_path / "kept")
    reshape(quiet, narrow)
    assert (replay(quiet).rows, open_seqs(quiet)) == (0, [2])
    other = append_table(tmp_path / "dropped")
    reshape(other, narrow, drop=EvolutionPolicy.APPLY)
    assert (replay(other).rows, open_seqs(other)) == (1, [])
    assert max((row["_seq"], row["name"]) for row in other.content()) == (2, "b")


def test_a_partial_change_lists_unsent_columns_by_their_current_names(tmp_path: Path) -> None:
    quiet = append_table(tmp_path)
    quiet.commit(update(1, unchanged=("big",), unfit=BAD, unfit_text="NaN"), schema=FULL)
    quiet.apply()
    reshape(quiet, renamed(TEXT, "big", "large"))
    assert replay(quiet).rows == 2
    assert {row["_seq"]: row["_unchanged"] for row in quiet.content()}[3] == ["large"]


def test_a_replayed_row_of_a_load_has_the_metadata_of_the_loaded_rows(tmp_path: Path) -> None:
    quiet = Quiet(tmp_path, on_bad_row="dead-letter", spec="mode: append", table_format=FORMAT)
    quiet.diary.commit()
    quiet.commit(insert(1, n=1), schema=FULL)
    rejects = LoadRejects(FULL, TableSpec(mode=TableMode.APPEND), LoadOrigin(seq=1, position="0/1", read_at=7), Lsn(9))
    (batch,) = record_batches(FULL, [{"id": 2, "name": "x"}])
    list(rejects.without_rejects([(batch, pa.array([[{"column": "n", "text": "NaN"}]], change.UNFIT_TYPE))]))
    quiet.reload([{"id": 1, "n": 1}], "first", schema=FULL)
    store = DeadLetterStore(quiet.settings.log.path, THINGS)
    store.write_load_rejects(
        "first",
        quiet.applied_position.seq,
        [DeadLetterBatch(schema=FULL, rows=rejects.dead_letters)],
        DeadLetterOrigin(1, "0/1"),
    )
    quiet.commit(update(2, n=5), schema=FULL)
    quiet.apply()
    reshape(quiet, TEXT)
    assert (replay(quiet).rows, open_seqs(quiet)) == (1, [])
    (row,) = [row for row in quiet.content() if row["name"] == "x"]
    assert (row["_op"], row["_seq"], row["_position"], row["_tx"], row["n"]) == ("read", 1, "0/1", None, "NaN")


def test_rows_of_a_keyless_table_are_replayed_as_copies(tmp_path: Path) -> None:
    quiet = keyless_table(tmp_path)
    assert (replay(quiet).rows, open_seqs(quiet)) == (0, [1, 2, 3])
    reshape(quiet, ONES, drop=EvolutionPolicy.APPLY)
    assert (replay(quiet).rows, open_seqs(quiet), ones(quiet)) == (3, [], [1, 2, 2, 2, 3])
    assert (replay(quiet).rows, ones(quiet)) == (0, [1, 2, 2, 2, 3])
    quiet.commit(delete({"a": 2}), delete({"a": 2}), delete({"a": 3}), schema=ONES)
    assert quiet.apply()[-1].error is None
    assert ones(quiet) == [1, 2]


def test_deleting_a_row_that_is_a_dead_letter_closes_only_that_dead_letter(tmp_path: Path) -> None:
    quiet = keyless_table(tmp_path)
    reshape(quiet, ONES, drop=EvolutionPolicy.APPLY)
    quiet.commit(delete({"a": 3}), delete({"a": 2}), insert({"a": 3}), schema=ONES)
    assert quiet.apply()[-1].error is None, "the table has no such row"
    assert (open_seqs(quiet), ones(quiet)) == ([2], [1, 2, 3])
    assert (replay(quiet).rows, ones(quiet)) == (1, [1, 2, 2, 3])
    quiet.commit(*(delete({"a": key}) for key in (1, 2, 2, 3)), schema=ONES)
    assert quiet.apply()[-1].error is None
    assert ones(quiet) == []


@pytest.mark.slow
@not_spark  # a commit for each step
def test_a_keyless_table_equals_the_source_whenever_dead_letters_are_replayed(tmp_path: Path) -> None:
    chance = random.Random(20261118)
    for number in range(3):
        quiet, source = keyless_table(tmp_path / str(number)), [1, 2, 2, 2, 3]
        reshape(quiet, ONES, drop=EvolutionPolicy.APPLY)
        for _ in range(8):
            rows = []
            for _ in range(chance.randint(1, 4)):
                if source and chance.random() < 0.7:
                    rows.append(delete({"a": source.pop(chance.randrange(len(source)))}))
                else:
                    source.append(chance.randint(1, 3))
                    rows.append(insert({"a": source[-1]}))
            quiet.commit(*rows, schema=ONES)
            if chance.random() < 0.5:
                assert quiet.apply()[-1].error is None
            if chance.random() < 0.1:
                replay(quiet)
        assert all(outcome.error is None for outcome in quiet.apply())
        replay(quiet)
        assert (ones(quiet), open_seqs(quiet)) == (sorted(source), [])


def test_a_replayed_row_has_the_default_of_a_column_added_since(tmp_path: Path) -> None:
    quiet = keyless_table(tmp_path)
    column = Column(name="c", source_type="integer", type=pa.int32())
    schema = with_facts(replace(ONES, columns=(*ONES.columns, column)), (1, 3), 3)
    assert schema.facts is not None
    column_facts = replace(schema.facts.columns[1], fast_default="7")
    schema = replace(schema, facts=replace(schema.facts, columns=(schema.facts.columns[0], column_facts)))
    recast = Recast(schema=schema, added=("c",), backfilled=(("c", pa.scalar(7, pa.int32())),), dropped=("b",))
    outcome = run(
        advance_table, EvolveWork(table=THINGS, location=quiet.location, recast=recast, expected=quiet.applied_position)
    )
    assert outcome.error is None
    assert replay(quiet).rows == 3
    assert sorted((row["a"], row["c"]) for row in quiet.content()) == [(1, 7), (2, 7), (2, 7), (2, 7), (3, 7)]


def test_a_row_is_not_replayed_while_values_of_new_columns_are_unknown(tmp_path: Path) -> None:
    quiet = keyless_table(tmp_path)
    unknown = replace(ONES, facts=None)
    recast = Recast(schema=unknown, dropped=("b",))
    run(
        advance_table, EvolveWork(table=THINGS, location=quiet.location, recast=recast, expected=quiet.applied_position)
    )
    assert (replay(quiet).rows, open_seqs(quiet), ones(quiet)) == (0, [1, 2, 3], [1, 2])
    (bundle,) = DeadLetterStore(quiet.settings.log.path, THINGS).read_open(quiet.applied_position.seq)
    assert "the table has other columns now" in bundle.rows.column(CAUSE)[0].as_py()


REPLAY = """
import pickle, sys
from tailrace.tasks.keyless_replay import replay_changes
replay_changes(pickle.load(open(sys.argv[1], "rb")))
"""
FAILPOINTS = ["letters.promised", "table.before_commit", "table.after_commit", "letters.delivered"]


def killed(quiet: Quiet, failpoint: str, folder: Path) -> None:
    (folder / "work").write_bytes(pickle.dumps(work_of(quiet)))
    environment = {"TAILRACE_FAILPOINT": failpoint, "TAILRACE_FAILPOINT_LOG": str(folder / "hits")}
    process = subprocess.run(
        [sys.executable, "-c", REPLAY, str(folder / "work")],
        check=False,
        start_new_session=True,
        env={**os.environ, **environment},
    )
    assert process.returncode == -9


@not_spark  # a task is killed, and not the process that waits for it
@pytest.mark.parametrize(
    ("failpoint", "between"),
    [*((failpoint, "changes") for failpoint in FAILPOINTS), *((failpoint, "nothing") for failpoint in FAILPOINTS[1:]),
     ("table.after_commit", "upkeep"), ("letters.delivered", "another schema"),
     ("letters.promised", "another that dies")],
)  # fmt: skip
def test_a_change_is_written_once_wherever_the_replay_is_killed(tmp_path: Path, failpoint: str, between: str) -> None:
    quiet = append_table(tmp_path / "quiet")
    reshape(quiet, TEXT)
    killed(quiet, failpoint, tmp_path)
    assert open_seqs(quiet) == [2], "until recovery has run"
    if between == "changes":
        quiet.commit(update(1, name="c", n="3"), schema=TEXT)
        assert quiet.apply()[-1].error is None
        committed = failpoint in FAILPOINTS[2:]
        assert open_seqs(quiet) == ([] if committed else [2]), "an apply runs the recovery"
    elif between == "upkeep":
        quiet.table.compact(UpkeepPlan(file_bytes=None, remove_after_seconds=0), quiet.applied_position)
    elif between == "another schema":
        reshape(quiet, renamed(TEXT, "big", "large"))
    elif between == "another that dies":
        killed(quiet, "letters.promised", tmp_path)
    replay(quiet)
    assert ([row for row in changes_of(quiet) if row[0] == 2], open_seqs(quiet)) == ([(2, "update", "b", "NaN")], [])
    assert not DeadLetterStore(quiet.settings.log.path, THINGS).has_any


@not_spark
@pytest.mark.parametrize("failpoint", FAILPOINTS)
@pytest.mark.parametrize("changed", [False, True])
def test_a_keyless_table_has_as_many_copies_as_the_source_wherever_the_replay_is_killed(
    tmp_path: Path, failpoint: str, changed: bool
) -> None:
    quiet = keyless_table(tmp_path / "quiet")
    reshape(quiet, ONES, drop=EvolutionPolicy.APPLY)
    killed(quiet, failpoint, tmp_path)
    if changed:
        quiet.commit(delete({"a": 2}), delete({"a": 3}), schema=ONES)
        assert quiet.apply()[-1].error is None
    replay(quiet)
    assert (ones(quiet), open_seqs(quiet)) == ([1, 2, 2] if changed else [1, 2, 2, 2, 3], [])


@pytest.mark.skipif(not IS_SPARK, reason="delta-rs writes and confirms in one task")
@pytest.mark.parametrize("dies", ["before the commit", "after it"])
def test_a_change_is_written_once_when_the_driver_dies_around_its_commit(tmp_path: Path, dies: str) -> None:
    quiet = append_table(tmp_path)
    reshape(quiet, TEXT)
    work, table = work_of(quiet), spark_engine()._table(quiet.location)
    with table.scratch() as scratch:
        found = stage_replay_changes(StageReplayChangesWork(work=work, path=scratch / "late.parquet"))
        assert not isinstance(found, TailraceError)
        intent, folded = found
        assert intent.replay_id is not None
        if dies == "after it":
            table.append_files(
                TEXT, folded, work.expected, previous_replay_id=intent.previous_replay_id, replay_id=intent.replay_id
            )
    assert open_seqs(quiet) == [2]
    assert replay(quiet).rows == (0 if dies == "after it" else 1)
    assert ([row for row in changes_of(quiet) if row[0] == 2], open_seqs(quiet)) == ([(2, "update", "b", "NaN")], [])


@not_spark
def test_a_replay_whose_process_was_thought_dead_adds_nothing_twice(tmp_path: Path) -> None:
    quiet = append_table(tmp_path)
    reshape(quiet, TEXT)
    row = fold(replace(TEXT, key=()), changes(TEXT, insert(9)))
    with pytest.raises(ForeignWrite):
        quiet.table.append_rows(TEXT, row, quiet.applied_position, previous_replay_id="another", replay_id="mine")
    assert (replay(quiet).rows, quiet.table.replay_id() is None) == (1, False)
    with pytest.raises(ForeignWrite):
        quiet.table.append_rows(TEXT, row, quiet.applied_position, previous_replay_id=None, replay_id="mine")


@not_spark
def test_a_load_that_adds_to_the_table_does_not_reopen_replayed_dead_letters(tmp_path: Path) -> None:
    """The load's commit is made in a table that still has the replay id, and no recovery has run since the kill."""
    quiet = append_table(tmp_path / "quiet")
    reshape(quiet, TEXT)
    killed(quiet, "letters.delivered", tmp_path)
    store = DeadLetterStore(quiet.settings.log.path, THINGS)
    store.before_load("more", whole=False, now=None, seq=quiet.applied_position.seq, replay_id=quiet.table.replay_id())
    assert open_seqs(quiet) == []
    steps = [
        json.loads(pa.ipc.open_file(path).schema.metadata[b"tailrace"])
        for path in (quiet.settings.log.path / "dead").glob("*/*.arrow")
    ]
    assert not any("late" in step for step in steps), "it counts whatever replay id the table has later"
