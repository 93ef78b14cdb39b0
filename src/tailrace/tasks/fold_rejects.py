"""Distributed dead letters. Each fold task writes its rejects to a file, and one last task stores them.

The invariant is that of `tasks.dead_letters`: a rejected change is durable as a dead letter before the commit whose
position passes it. One task stores the rejects of all tasks in one step, so that their total number is known. The
driver sees only causes and numbers.

A task looks up whether the table has the row that a change builds on. Tasks cannot read an Iceberg table: only Spark
jobs do. There a task writes the keys to a file and assumes that they exist. The driver runs a job that finds the
missing ones, and if there are any, all changes are split once more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tailrace.deadletters.keyed import KeyExists, SplitResult
from tailrace.deadletters.store import DeadLetterStore
from tailrace.errors import TailraceError
from tailrace.model import change
from tailrace.tables.delta.key_lookup import match_answers
from tailrace.tables.fold.folded_changes import Flags
from tailrace.tables.fold.row_ids import Ints
from tailrace.tasks.dead_letters import (
    DEAD_LETTERS_MAX,
    ApplyStep,
    assume_all_exist,
    refuse_too_many,
    split_by_mode,
    store_dead_letters,
)
from tailrace.tasks.source_rows import refetch_rows
from tailrace.tasks.work import ApplyWork, as_tailrace_error

ASKED_KEYS_SUFFIX = "-asked.parquet"
"""Suffix of files with keys that a task assumed to exist: columns `k0…kN`, in the order of the key."""
MISSING_KEYS = "missing"
"""Name, in the same folder, of the files with the keys that the table lacks. Present once that is known."""


@dataclass(frozen=True, kw_only=True)
class TaskRejects:
    """Changes that one task rejected: a file, and facts about them."""

    file: Path
    causes: tuple[TailraceError, ...]
    """Cause of each rejected change, in order."""
    cleared: tuple[int, ...]
    """`_seq` of earlier dead letters that these changes clear."""
    superseded: tuple[int, ...] = ()
    """`_seq` of dead letters that nothing builds on any more."""


@dataclass(frozen=True, kw_only=True)
class StoreRejectsWork:
    """Store the rejects of all tasks as dead letters."""

    work: ApplyWork
    rejects: tuple[TaskRejects, ...]


def split_rejects_to_file(work: ApplyWork, changes: pa.Table, path: Path) -> tuple[pa.Table, TaskRejects | None]:
    """Return the changes that the table can take; write any others to a file."""
    step, store = _step(work), DeadLetterStore(work.log, work.table)
    split = split_by_mode(_key_lookup(work, path), step, changes, store)
    if not split.dead_letters.num_rows and not split.cleared.size and not split.superseded.size:
        return split.changes, None
    # The total of all tasks is checked later, by `store_task_rejects`.
    if not step.dead_letters_enabled or split.dead_letters.num_rows > DEAD_LETTERS_MAX:
        refuse_too_many(step, split, store)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, split.dead_letters.schema) as writer:
        writer.write_table(split.dead_letters)
    return split.changes, TaskRejects(
        file=path,
        causes=tuple(split.causes),
        cleared=tuple(split.cleared.tolist()),
        superseded=tuple(split.superseded.tolist()),
    )


def _key_lookup(work: ApplyWork, path: Path) -> KeyExists:
    return (
        partial(work.location.open().keys_exist, work.schema)
        if work.location.catalog is None
        else DeferredKeyLookup(path)
    )


class DeferredKeyLookup:
    """Key lookup in a table that no task can read. Assumes that keys exist until a job has found the missing ones."""

    def __init__(self, path: Path) -> None:
        self._path, self._missing, self._asked = path, path.parent / MISSING_KEYS, 0

    def __call__(self, keys: pa.Table) -> Flags:
        keys = keys.rename_columns([f"k{i}" for i in range(keys.num_columns)])
        if self._missing.exists():
            return match_answers(keys, pq.read_table(self._missing)) < 0
        pq.write_table(keys, f"{self._path}-{self._asked:04d}{ASKED_KEYS_SUFFIX}", store_schema=False)
        self._asked += 1
        return assume_all_exist(keys)


def store_task_rejects(rejects_work: StoreRejectsWork) -> TailraceError | None:
    """Store the rejects of all tasks in one step; return the error if that fails."""
    work = rejects_work.work
    try:
        dead_letters = pa.concat_tables(_read(item.file) for item in rejects_work.rejects)
        causes = [cause for item in rejects_work.rejects for cause in item.causes]
        order = np.argsort(dead_letters.column(change.SEQ).to_numpy())
        split = SplitResult(
            changes=dead_letters.slice(0, 0),
            dead_letters=dead_letters.take(pa.array(order)),
            causes=[causes[i] for i in order],
            cleared=_all([item.cleared for item in rejects_work.rejects]),
            superseded=_all([item.superseded for item in rejects_work.rejects]),
        )
        store_dead_letters(_step(work), split, DeadLetterStore(work.log, work.table))
    except Exception as error:  # the task's boundary
        return as_tailrace_error(error)
    return None


def _all(seqs: Iterable[tuple[int, ...]]) -> Ints:
    merged: Ints = np.unique(np.concatenate([np.array(some, np.int64) for some in seqs]))
    return merged


def _read(path: Path) -> pa.Table:
    with pa.OSFile(str(path)) as file:
        return pa.ipc.open_file(file).read_all()


def _step(work: ApplyWork) -> ApplyStep:
    return ApplyStep(
        log=work.log,
        schema=work.schema,
        spec=work.location.spec,
        expected=work.expected,
        position_after=work.position_after,
        dead_letters_enabled=work.dead_letters_enabled,
        refetch=None if work.reader is None else partial(refetch_rows, work, ()),
    )
