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

from tailrace.deadletters.keyed import Holds, Sifted
from tailrace.deadletters.store import Letters
from tailrace.errors import TailraceError
from tailrace.model import change
from tailrace.tables.delta.key_lookup import answers_to
from tailrace.tables.fold.fold import Flags
from tailrace.tables.fold.row_ids import Ints
from tailrace.tasks.dead_letters import LETTERS_MAX, Step, all_held, keep_letters, refuse_too_many, sifted_by
from tailrace.tasks.work import ApplyWork, as_ours, read_again

ASKED = "-asked.parquet"
"""How the names of files end, in which keys are that a task has taken for held: columns `k0…kN`, in the key's order."""
MISSING = "missing"
"""The files, beside them, with those that the table does not hold, once that is known."""


@dataclass(frozen=True, kw_only=True)
class Aside:
    """What one task has left out: the changes in a file, and what there is to say of them."""

    file: Path
    causes: tuple[TailraceError, ...]
    """Why, letter by letter."""
    cleared: tuple[int, ...]
    """`_seq` of earlier letters,"""
    passed: tuple[int, ...] = ()
    """and of letters that nothing builds on any more."""


@dataclass(frozen=True, kw_only=True)
class KeepWork:
    """Make letters of what the tasks have left out."""

    work: ApplyWork
    aside: tuple[Aside, ...]


def sift_aside(work: ApplyWork, changes: pa.Table, path: Path) -> tuple[pa.Table, Aside | None]:
    """The changes that the table can take; the others go into a file, if there are any."""
    step, letters = _step(work), Letters(work.log, work.table)
    found = sifted_by(_holds(work, path), step, changes, letters)
    if not found.letters.num_rows and not found.cleared.size and not found.passed.size:
        return found.changes, None
    if not step.on or found.letters.num_rows > LETTERS_MAX:  # how many there are in all is seen later
        refuse_too_many(step, found, letters)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, found.letters.schema) as writer:
        writer.write_table(found.letters)
    return found.changes, Aside(
        file=path,
        causes=tuple(found.causes),
        cleared=tuple(found.cleared.tolist()),
        passed=tuple(found.passed.tolist()),
    )


def _holds(work: ApplyWork, path: Path) -> Holds:
    return partial(work.place.open().holds, work.shape) if work.place.catalog is None else Noting(path)


class Noting:
    """Which keys a table holds that no task can ask."""

    def __init__(self, path: Path) -> None:
        self._path, self._missing, self._asked = path, path.parent / MISSING, 0

    def __call__(self, keys: pa.Table) -> Flags:
        keys = keys.rename_columns([f"k{i}" for i in range(keys.num_columns)])
        if self._missing.exists():
            return answers_to(keys, pq.read_table(self._missing)) < 0
        pq.write_table(keys, f"{self._path}-{self._asked:04d}{ASKED}", store_schema=False)
        self._asked += 1
        return all_held(keys)


def keep_aside(asked: KeepWork) -> TailraceError | None:
    """One step of all that the tasks have left out."""
    work = asked.work
    try:
        letters = pa.concat_tables(_read(item.file) for item in asked.aside)
        causes = [cause for item in asked.aside for cause in item.causes]
        order = np.argsort(letters.column(change.SEQ).to_numpy())
        found = Sifted(
            changes=letters.slice(0, 0),
            letters=letters.take(pa.array(order)),
            causes=[causes[i] for i in order],
            cleared=_all([item.cleared for item in asked.aside]),
            passed=_all([item.passed for item in asked.aside]),
        )
        keep_letters(_step(work), found, Letters(work.log, work.table))
    except Exception as error:  # the task's boundary
        return as_ours(error)
    return None


def _all(seqs: Iterable[tuple[int, ...]]) -> Ints:
    found: Ints = np.unique(np.concatenate([np.array(some, np.int64) for some in seqs]))
    return found


def _read(path: Path) -> pa.Table:
    with pa.OSFile(str(path)) as file:
        return pa.ipc.open_file(file).read_all()


def _step(work: ApplyWork) -> Step:
    return Step(
        log=work.log,
        schema=work.shape,
        form=work.place.form,
        expected=work.expected,
        cursor=work.cursor,
        on=work.letters,
        reread=None if work.reader is None else partial(read_again, work, ()),
    )
