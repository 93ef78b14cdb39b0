"""Changes that a table cannot take, told apart by the tasks that fold a stretch, and set aside together.

What must stay true is what `setting_aside` says: a change is durable as a letter before the commit that passes it. The
tasks leave such changes in files; one more makes a step of them all, so that it can be seen how many there are. The
driver hears of causes and numbers.

Whether a table holds the row that a change builds on is asked of it where a task can do that. An Iceberg table is read
by Spark's jobs alone, so tasks note the keys, and take them for held. The driver has a job find those that are not, and
if there are some all is told apart once more.
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
from tailrace.tables.fold.fold import Flags
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
"""How the names of files end, in which keys are that a task has taken for held: columns `k0…kN`, in the key's order."""
MISSING_KEYS = "missing"
"""The files, beside them, with those that the table does not hold, once that is known."""


@dataclass(frozen=True, kw_only=True)
class TaskRejects:
    """What one task has left out: the changes in a file, and what there is to say of them."""

    file: Path
    causes: tuple[TailraceError, ...]
    """Why, letter by letter."""
    cleared: tuple[int, ...]
    """`_seq` of earlier letters,"""
    superseded: tuple[int, ...] = ()
    """and of letters that nothing builds on any more."""


@dataclass(frozen=True, kw_only=True)
class StoreRejectsWork:
    """Make letters of what the tasks have left out."""

    work: ApplyWork
    rejects: tuple[TaskRejects, ...]


def split_rejects_to_file(work: ApplyWork, changes: pa.Table, path: Path) -> tuple[pa.Table, TaskRejects | None]:
    """The changes that the table can take; the others go into a file, if there are any."""
    step, letters = _step(work), DeadLetterStore(work.log, work.table)
    found = split_by_mode(_key_lookup(work, path), step, changes, letters)
    if not found.dead_letters.num_rows and not found.cleared.size and not found.superseded.size:
        return found.changes, None
    if (
        not step.dead_letters_enabled or found.dead_letters.num_rows > DEAD_LETTERS_MAX
    ):  # how many there are in all is seen later
        refuse_too_many(step, found, letters)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, found.dead_letters.schema) as writer:
        writer.write_table(found.dead_letters)
    return found.changes, TaskRejects(
        file=path,
        causes=tuple(found.causes),
        cleared=tuple(found.cleared.tolist()),
        superseded=tuple(found.superseded.tolist()),
    )


def _key_lookup(work: ApplyWork, path: Path) -> KeyExists:
    return (
        partial(work.location.open().keys_exist, work.schema)
        if work.location.catalog is None
        else DeferredKeyLookup(path)
    )


class DeferredKeyLookup:
    """Which keys a table holds that no task can ask."""

    def __init__(self, path: Path) -> None:
        self._path, self._missing, self._asked = path, path.parent / MISSING_KEYS, 0

    def __call__(self, keys: pa.Table) -> Flags:
        keys = keys.rename_columns([f"k{i}" for i in range(keys.num_columns)])
        if self._missing.exists():
            return match_answers(keys, pq.read_table(self._missing)) < 0
        pq.write_table(keys, f"{self._path}-{self._asked:04d}{ASKED_KEYS_SUFFIX}", store_schema=False)
        self._asked += 1
        return assume_all_exist(keys)


def store_task_rejects(asked: StoreRejectsWork) -> TailraceError | None:
    """One step of all that the tasks have left out."""
    work = asked.work
    try:
        letters = pa.concat_tables(_read(item.file) for item in asked.rejects)
        causes = [cause for item in asked.rejects for cause in item.causes]
        order = np.argsort(letters.column(change.SEQ).to_numpy())
        found = SplitResult(
            changes=letters.slice(0, 0),
            dead_letters=letters.take(pa.array(order)),
            causes=[causes[i] for i in order],
            cleared=_all([item.cleared for item in asked.rejects]),
            superseded=_all([item.superseded for item in asked.rejects]),
        )
        store_dead_letters(_step(work), found, DeadLetterStore(work.log, work.table))
    except Exception as error:  # the task's boundary
        return as_tailrace_error(error)
    return None


def _all(seqs: Iterable[tuple[int, ...]]) -> Ints:
    found: Ints = np.unique(np.concatenate([np.array(some, np.int64) for some in seqs]))
    return found


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
