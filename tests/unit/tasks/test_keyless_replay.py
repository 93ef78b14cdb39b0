"""Letters whose own changes come in late: each once, as what it would have been, whatever dies on the way.

`make engines` runs this with Spark's connectors, too.
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

from tailrace.deadletters.store import CAUSE, DeadLetterBatch, DeadLetterStore
from tailrace.deadletters.store import DeadLetterOrigin as LettersOrigin
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


def with_facts(schema: TableSchema, numbers: tuple[int, ...], made: int) -> TableSchema:
    columns = tuple(
        ColumnFacts(number=one, nullable=True, default=None, fast_default=None, definition_version=1) for one in numbers
    )
    stored = StorageFacts(relation=schema.relation, name="public.things", file=5, attached=False)
    return replace(schema, facts=CatalogueFacts(columns=columns, storage=(stored,), columns_ever=made))


def retyped(schema: TableSchema, name: str, kind: pa.DataType) -> TableSchema:
    columns = [
        Column(name=name, source_type=str(kind), type=kind) if one.name == name else one for one in schema.columns
    ]
    return replace(schema, columns=tuple(columns))


def renamed(schema: TableSchema, old: str, new: str) -> TableSchema:
    columns = (replace(one, name=new) if one.name == old else one for one in schema.columns)
    return replace(schema, columns=tuple(columns))


TEXT = retyped(FULL, "n", pa.string())
"""The table with a column that takes every value."""
PAIRS = with_facts(KEYLESS, (1, 2), 2)
ONES = with_facts(replace(KEYLESS, columns=KEYLESS.columns[:1]), (1,), 2)
"""The table without a key, before and after a column of it was dropped."""


def of_changes(folder: Path, form: str = "mode: append") -> Quiet:
    """A table of changes: one row was read, and of two changes the second is a letter."""
    made = Quiet(folder, on_bad_row="dead-letter", spec=form, table_format=FORMAT)
    made.load([{"id": 1, "n": 0}], schema=FULL)
    made.commit(update(1, name="a", n=1), update(1, name="b", unfit=BAD, unfit_text="NaN"), schema=FULL)
    assert made.apply()[-1].error is None
    return made


def of_copies(folder: Path) -> Quiet:
    """A table without a key: three rows that are letters, and two of them are equal but for what is dropped."""
    made = Quiet(folder, on_bad_row="dead-letter", table_format=FORMAT)
    made.load([{"a": 1, "b": "x"}], schema=PAIRS)
    rows = [insert({"a": key}, unfit=("b",), unfit_text=f"t{n}") for n, key in enumerate((2, 2, 3))]
    made.commit(*rows, insert({"a": 2}, b="y"), schema=PAIRS)
    assert made.apply()[-1].error is None
    return made


def reshape(quiet: Quiet, schema: TableSchema, *, drop: EvolutionPolicy = EvolutionPolicy.KEEP_NULL) -> None:
    """Give the table another shape, as the pipeline does it; of one that keeps the past the load has landed, too."""
    place, old = quiet.location, quiet.location.open_for_reading().schema()
    assert old is not None
    policies = EvolutionPolicies(drop=drop)
    if place.spec.keeps_past:
        recast: Any = carry_over(place.spec, old, schema, policies, no_value)
    else:
        recast = plan_evolution(old, schema, policies, no_value, place.spec)
    assert isinstance(recast, Recast)
    recast = replace(recast, schema=schema)
    done = run(advance_table, EvolveWork(table=THINGS, location=place, recast=recast, expected=quiet.applied_position))
    assert done.error is None


def run(task: Callable[[Any], Outcome], work: Any) -> Outcome:
    """Work, done by whoever writes the table."""
    if not IS_SPARK:
        return task(work)
    (outcome,) = spark_engine().run(task, [work])
    return outcome


def work_of(quiet: Quiet) -> ReplayChangesWork:
    shape = quiet.location.open_for_reading().schema()
    assert shape is not None
    return ReplayChangesWork(
        log=quiet.settings.log.path, location=quiet.location, schema=shape, expected=quiet.applied_position
    )


def deliver(quiet: Quiet) -> Outcome:
    done = run(replay_changes, work_of(quiet))
    assert done.error is None
    return done


def letters(quiet: Quiet) -> list[int]:
    found = DeadLetterStore(quiet.settings.log.path, THINGS).read_open(
        quiet.applied_position.seq, quiet.applied_position.load
    )
    return sorted(seq for bundle in found for seq in bundle.seqs)


def told(quiet: Quiet) -> list[tuple[Any, ...]]:
    """What a table of changes tells, in order."""
    rows = sorted(quiet.content(), key=lambda row: int(row["_seq"]))
    return [(row["_seq"], row["_op"], row["name"], row["n"]) for row in rows]


def ones(quiet: Quiet) -> list[int]:
    return sorted(row["a"] for row in quiet.content())


def test_a_change_that_fits_now_is_the_row_that_it_would_have_been_and_comes_once(tmp_path: Path) -> None:
    quiet = of_changes(tmp_path)
    assert (deliver(quiet).rows, letters(quiet)) == (0, [2]), "nothing has changed"
    reshape(quiet, TEXT)
    quiet.commit(update(1, name="c", n="3"), schema=TEXT)
    assert quiet.apply()[-1].error is None
    position = quiet.applied_position
    done = deliver(quiet)
    assert (done.rows, done.dead_letters, done.version) == (1, 0, quiet.location.open_for_reading().version())
    assert quiet.applied_position == position
    assert told(quiet) == [
        (0, "read", None, "0"),
        (1, "update", "a", "1"),
        (2, "update", "b", "NaN"),
        (3, "update", "c", "3"),
    ]
    first, late = sorted(quiet.content(), key=lambda row: int(row["_seq"]))[1:3]
    assert all(late[name] == first[name] for name in ("_position", "_tx", "_committed_at"))
    assert (deliver(quiet).rows, len(told(quiet)), letters(quiet)) == (0, 4, [])
    assert not DeadLetterStore(quiet.settings.log.path, THINGS).has_any


def test_what_still_has_no_place_stays_and_says_why(tmp_path: Path) -> None:
    quiet = of_changes(tmp_path)
    failed = update(2, unfit=BAD, unfit_text=rule_failure_text("hash", "no key"))
    quiet.commit(failed, update(3, name="c", unfit=BAD, unfit_text="NaN"), schema=FULL)
    quiet.apply()
    reshape(quiet, retyped(TEXT, "name", pa.int64()))  # what was a text has no place in it
    assert (deliver(quiet).rows, letters(quiet)) == (0, [2, 3, 4])
    mine = DeadLetterStore(quiet.settings.log.path, THINGS).read_open(quiet.applied_position.seq)
    causes = dict(
        zip(
            [seq for one in mine for seq in one.seqs],
            [text for one in mine for text in one.rows.column(CAUSE).to_pylist()],
            strict=True,
        )
    )
    assert "no longer holds the change's value" in causes[2]
    assert "column=name" in causes[4]
    assert "a rule could not be applied" in causes[3], "whatever the column takes, the value was never written down"
    assert len(told(quiet)) == 2


def test_no_value_is_lost_in_a_column_that_only_the_table_still_has(tmp_path: Path) -> None:
    narrow = replace(FULL, columns=FULL.columns[:3])
    narrow = with_facts(narrow, (1, 2, 3), 4)
    quiet = of_changes(tmp_path / "kept")
    reshape(quiet, narrow)
    assert (deliver(quiet).rows, letters(quiet)) == (0, [2])
    other = of_changes(tmp_path / "dropped")
    reshape(other, narrow, drop=EvolutionPolicy.APPLY)
    assert (deliver(other).rows, letters(other)) == (1, [])
    assert max((row["_seq"], row["name"]) for row in other.content()) == (2, "b")


def test_a_partial_change_says_under_the_names_of_now_what_did_not_come(tmp_path: Path) -> None:
    quiet = of_changes(tmp_path)
    quiet.commit(update(1, unchanged=("big",), unfit=BAD, unfit_text="NaN"), schema=FULL)
    quiet.apply()
    reshape(quiet, renamed(TEXT, "big", "large"))
    assert deliver(quiet).rows == 2
    assert {row["_seq"]: row["_unchanged"] for row in quiet.content()}[3] == ["large"]


def test_a_row_that_a_load_could_not_bring_stands_with_those_that_it_brought(tmp_path: Path) -> None:
    quiet = Quiet(tmp_path, on_bad_row="dead-letter", spec="mode: append", table_format=FORMAT)
    quiet.diary.commit()
    quiet.commit(insert(1, n=1), schema=FULL)
    kept = LoadRejects(FULL, TableSpec(mode=TableMode.APPEND), LoadOrigin(seq=1, position="0/1", read_at=7), Lsn(9))
    (batch,) = record_batches(FULL, [{"id": 2, "name": "x"}])
    list(kept.without_rejects([(batch, pa.array([[{"column": "n", "text": "NaN"}]], change.UNFIT_TYPE))]))
    quiet.reload([{"id": 1, "n": 1}], "first", schema=FULL)
    aside = DeadLetterStore(quiet.settings.log.path, THINGS)
    aside.write_load_rejects(
        "first",
        quiet.applied_position.seq,
        [DeadLetterBatch(schema=FULL, rows=kept.dead_letters)],
        LettersOrigin(1, "0/1"),
    )
    quiet.commit(update(2, n=5), schema=FULL)
    quiet.apply()
    reshape(quiet, TEXT)
    assert (deliver(quiet).rows, letters(quiet)) == (1, [])
    (row,) = [row for row in quiet.content() if row["name"] == "x"]
    assert (row["_op"], row["_seq"], row["_position"], row["_tx"], row["n"]) == ("read", 1, "0/1", None, "NaN")


def test_rows_of_a_table_without_a_key_come_in_as_copies(tmp_path: Path) -> None:
    quiet = of_copies(tmp_path)
    assert (deliver(quiet).rows, letters(quiet)) == (0, [1, 2, 3])
    reshape(quiet, ONES, drop=EvolutionPolicy.APPLY)
    assert (deliver(quiet).rows, letters(quiet), ones(quiet)) == (3, [], [1, 2, 2, 2, 3])
    assert (deliver(quiet).rows, ones(quiet)) == (0, [1, 2, 2, 2, 3])
    quiet.commit(delete({"a": 2}), delete({"a": 2}), delete({"a": 3}), schema=ONES)
    assert quiet.apply()[-1].error is None
    assert ones(quiet) == [1, 2]


def test_a_row_that_goes_while_it_is_a_letter_takes_the_letter_and_no_more(tmp_path: Path) -> None:
    quiet = of_copies(tmp_path)
    reshape(quiet, ONES, drop=EvolutionPolicy.APPLY)
    quiet.commit(delete({"a": 3}), delete({"a": 2}), insert({"a": 3}), schema=ONES)
    assert quiet.apply()[-1].error is None, "the table has no such row"
    assert (letters(quiet), ones(quiet)) == ([2], [1, 2, 3])
    assert (deliver(quiet).rows, ones(quiet)) == (1, [1, 2, 2, 3])
    quiet.commit(*(delete({"a": key}) for key in (1, 2, 2, 3)), schema=ONES)
    assert quiet.apply()[-1].error is None
    assert ones(quiet) == []


@not_spark  # a commit for each step
def test_any_story_ends_as_the_source_whenever_letters_are_tried(tmp_path: Path) -> None:
    chance = random.Random(20261118)
    for number in range(3):
        quiet, source = of_copies(tmp_path / str(number)), [1, 2, 2, 2, 3]
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
                deliver(quiet)
        assert all(outcome.error is None for outcome in quiet.apply())
        deliver(quiet)
        assert (ones(quiet), letters(quiet)) == (sorted(source), [])


def test_a_column_that_is_added_has_in_a_letter_s_row_what_it_has_in_the_others(tmp_path: Path) -> None:
    quiet = of_copies(tmp_path)
    column = Column(name="c", source_type="integer", type=pa.int32())
    shape = with_facts(replace(ONES, columns=(*ONES.columns, column)), (1, 3), 3)
    assert shape.facts is not None
    told = replace(shape.facts.columns[1], fast_default="7")
    shape = replace(shape, facts=replace(shape.facts, columns=(shape.facts.columns[0], told)))
    recast = Recast(schema=shape, added=("c",), backfilled=(("c", pa.scalar(7, pa.int32())),), dropped=("b",))
    done = run(
        advance_table, EvolveWork(table=THINGS, location=quiet.location, recast=recast, expected=quiet.applied_position)
    )
    assert done.error is None
    assert deliver(quiet).rows == 3
    assert sorted((row["a"], row["c"]) for row in quiet.content()) == [(1, 7), (2, 7), (2, 7), (2, 7), (3, 7)]


def test_what_the_source_has_in_a_row_now_is_not_guessed(tmp_path: Path) -> None:
    quiet = of_copies(tmp_path)
    unknown = replace(ONES, facts=None)
    recast = Recast(schema=unknown, dropped=("b",))
    run(
        advance_table, EvolveWork(table=THINGS, location=quiet.location, recast=recast, expected=quiet.applied_position)
    )
    assert (deliver(quiet).rows, letters(quiet), ones(quiet)) == (0, [1, 2, 3], [1, 2])
    (bundle,) = DeadLetterStore(quiet.settings.log.path, THINGS).read_open(quiet.applied_position.seq)
    assert "the table has other columns by now" in bundle.rows.column(CAUSE)[0].as_py()


LATE = """
import pickle, sys
from tailrace.tasks.keyless_replay import replay_changes
replay_changes(pickle.load(open(sys.argv[1], "rb")))
"""
PLACES = ["letters.promised", "table.before_commit", "table.after_commit", "letters.delivered"]


def killed(quiet: Quiet, place: str, folder: Path) -> None:
    (folder / "work").write_bytes(pickle.dumps(work_of(quiet)))
    armed = {"TAILRACE_FAILPOINT": place, "TAILRACE_FAILPOINT_LOG": str(folder / "hits")}
    died = subprocess.run(
        [sys.executable, "-c", LATE, str(folder / "work")],
        check=False,
        start_new_session=True,
        env={**os.environ, **armed},
    )
    assert died.returncode == -9


@not_spark  # a task is killed, and not the process that waits for it
@pytest.mark.parametrize(
    ("place", "between"),
    [*((place, "changes") for place in PLACES), *((place, "nothing") for place in PLACES[1:]),
     ("table.after_commit", "upkeep"), ("letters.delivered", "another shape"),
     ("letters.promised", "another that dies")],
)  # fmt: skip
def test_killed_anywhere_a_change_is_there_once(tmp_path: Path, place: str, between: str) -> None:
    quiet = of_changes(tmp_path / "quiet")
    reshape(quiet, TEXT)
    killed(quiet, place, tmp_path)
    assert letters(quiet) == [2], "until somebody has looked"
    if between == "changes":
        quiet.commit(update(1, name="c", n="3"), schema=TEXT)
        assert quiet.apply()[-1].error is None
        done = place in PLACES[2:]
        assert letters(quiet) == ([] if done else [2]), "whoever applies looks"
    elif between == "upkeep":
        quiet.table.compact(UpkeepPlan(file_bytes=None, remove_after_seconds=0), quiet.applied_position)
    elif between == "another shape":
        reshape(quiet, renamed(TEXT, "big", "large"))
    elif between == "another that dies":
        killed(quiet, "letters.promised", tmp_path)
    deliver(quiet)
    assert ([row for row in told(quiet) if row[0] == 2], letters(quiet)) == ([(2, "update", "b", "NaN")], [])
    assert not DeadLetterStore(quiet.settings.log.path, THINGS).has_any


@not_spark
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("changed", [False, True])
def test_killed_anywhere_the_copies_are_as_many_as_the_source_has(tmp_path: Path, place: str, changed: bool) -> None:
    quiet = of_copies(tmp_path / "quiet")
    reshape(quiet, ONES, drop=EvolutionPolicy.APPLY)
    killed(quiet, place, tmp_path)
    if changed:
        quiet.commit(delete({"a": 2}), delete({"a": 3}), schema=ONES)
        assert quiet.apply()[-1].error is None
    deliver(quiet)
    assert (ones(quiet), letters(quiet)) == ([1, 2, 2] if changed else [1, 2, 2, 2, 3], [])


@pytest.mark.skipif(not IS_SPARK, reason="the other engine adds and says so in one task")
@pytest.mark.parametrize("dies", ["before the commit", "after it"])
def test_where_the_driver_dies_around_its_commit_a_change_is_there_once(tmp_path: Path, dies: str) -> None:
    quiet = of_changes(tmp_path)
    reshape(quiet, TEXT)
    work, table = work_of(quiet), spark_engine()._table(quiet.location)
    with table.scratch() as scratch:
        found = stage_replay_changes(StageReplayChangesWork(work=work, path=scratch / "late.parquet"))
        assert not isinstance(found, TailraceError)
        promised, folded = found
        assert promised.replay_id is not None
        if dies == "after it":
            table.append_files(
                TEXT,
                folded,
                work.expected,
                previous_replay_id=promised.previous_replay_id,
                replay_id=promised.replay_id,
            )
    assert letters(quiet) == [2]
    assert deliver(quiet).rows == (0 if dies == "after it" else 1)
    assert ([row for row in told(quiet) if row[0] == 2], letters(quiet)) == ([(2, "update", "b", "NaN")], [])


@not_spark
def test_whoever_was_thought_dead_and_goes_on_adds_nothing_twice(tmp_path: Path) -> None:
    quiet = of_changes(tmp_path)
    reshape(quiet, TEXT)
    row = fold(replace(TEXT, key=()), changes(TEXT, insert(9)))
    with pytest.raises(ForeignWrite):
        quiet.table.append_rows(TEXT, row, quiet.applied_position, previous_replay_id="another", replay_id="mine")
    assert (deliver(quiet).rows, quiet.table.replay_id() is None) == (1, False)
    with pytest.raises(ForeignWrite):
        quiet.table.append_rows(TEXT, row, quiet.applied_position, previous_replay_id=None, replay_id="mine")


@not_spark
def test_a_load_that_adds_to_the_table_does_not_bring_back_what_came_in(tmp_path: Path) -> None:
    """The load's own commit is made in a table that bears the name; nobody has looked since the process died."""
    quiet = of_changes(tmp_path / "quiet")
    reshape(quiet, TEXT)
    killed(quiet, "letters.delivered", tmp_path)
    aside = DeadLetterStore(quiet.settings.log.path, THINGS)
    aside.before_load("more", whole=False, now=None, seq=quiet.applied_position.seq, replay_id=quiet.table.replay_id())
    assert letters(quiet) == []
    steps = [
        json.loads(pa.ipc.open_file(path).schema.metadata[b"tailrace"])
        for path in (quiet.settings.log.path / "dead").glob("*/*.arrow")
    ]
    assert not any("late" in step for step in steps), "it counts whatever the table bears later"
