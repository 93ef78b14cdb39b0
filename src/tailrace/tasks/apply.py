"""Apply changes to one lake table, recast it or compact it, in a Spark task.

One call is one table commit: it writes the rows and the new applied position together.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial

import pyarrow as pa

from tailrace import failpoints
from tailrace.changelog.read.index import Slice
from tailrace.changelog.read.reader import ChangeLog
from tailrace.changelog.read.row_steps import rows_after_position, rows_until_position
from tailrace.tables.schema_errors import schema_mismatch
from tailrace.tables.size_estimate import estimate_bytes
from tailrace.tasks.dead_letters import ApplyStep, ApplyStepResult, apply_with_dead_letters
from tailrace.tasks.source_rows import refetch_changed_rows
from tailrace.tasks.work import ApplyWork, CompactWork, EvolveWork, Outcome, as_tailrace_error


def advance_table(work: ApplyWork | EvolveWork) -> Outcome:
    """Run the next step of one table: a recast, or an apply."""
    return evolve_table(work) if isinstance(work, EvolveWork) else apply_changes(work)


def apply_changes(work: ApplyWork) -> Outcome:
    """Fold the slices, and write the rows with the new position in one commit."""
    started = time.monotonic()
    failpoints.hit("apply.before_table")
    try:
        changes = read_changes(work)
        result = _apply_step(work, changes)
    except Exception as error:  # the task's boundary: the table fails, the others continue
        return Outcome(table=work.table, error=as_tailrace_error(error))
    return Outcome(
        table=work.table,
        rows=changes.num_rows,
        seconds=time.monotonic() - started,
        applied_position=work.position_after,
        schema=work.schema,
        bytes_changed=estimate_bytes(work.schema, changes),
        bytes_written=result.applied.bytes,
        version=result.applied.version,
        dead_letters=result.dead_letters,
    )


def _apply_step(work: ApplyWork, changes: pa.Table) -> ApplyStepResult:
    refetch = partial(refetch_changed_rows, work, changes) if work.reader is not None else None
    step = ApplyStep(
        log=work.log,
        schema=work.schema,
        spec=work.location.spec,
        expected=work.expected,
        position_after=work.position_after,
        dead_letters_enabled=work.dead_letters_enabled,
        refetch=refetch,
    )
    return apply_with_dead_letters(work.location.open(), step, changes)


def compact_table(work: CompactWork) -> Outcome:
    """Run the upkeep of one table: compact small files, and remove old ones."""
    started, cpu_started = time.monotonic(), time.process_time()  # a Spark worker runs one task at a time
    upkeep_result, failure = None, None
    try:
        upkeep_result = work.location.open().compact(work.upkeep, work.expected)
    except Exception as error:  # the task's boundary
        failure = as_tailrace_error(error)
    return Outcome(
        table=work.table,
        seconds=time.monotonic() - started,
        cpu_seconds=time.process_time() - cpu_started,
        upkeep_result=upkeep_result,
        error=failure,
    )


def evolve_table(work: EvolveWork) -> Outcome:
    """Recast a table in one commit that leaves every row in the new schema."""
    started = time.monotonic()
    try:
        applied = work.location.open().evolve(work.recast, work.expected)
    except Exception as error:  # the task's boundary: the table fails, the others continue
        return Outcome(table=work.table, error=as_tailrace_error(error))
    return Outcome(
        table=work.table,
        seconds=time.monotonic() - started,
        applied_position=work.expected,
        schema=work.recast.schema,
        bytes_written=applied.bytes,
    )


def read_changes(work: ApplyWork) -> pa.Table:
    """Return the changes that the table has not applied, in order."""
    empty = pa.RecordBatch.from_pylist([], work.schema.change_schema())
    return pa.Table.from_batches([empty, *read_change_batches(work, work.expected.seq)])


def read_change_batches(work: ApplyWork, seq: int) -> Iterator[pa.RecordBatch]:
    """Yield the unapplied changes after `seq` in the work's slices, in order."""
    log = ChangeLog.open(work.log)
    for first, last in _group_slices(log, work.slices):
        for batch in log.read(first.first, last.last, tables=[first.table], after_seq=seq, to_seq=last.last_seq):
            batch = rows_after_position(batch, work.expected.position)  # a load has read the others
            if work.until is not None and batch.data.num_rows:
                batch = rows_until_position(batch, work.until)
            if batch.data.num_rows:
                if error := schema_mismatch(work.schema, batch.schema, first.first):
                    raise error
                yield batch.with_all_columns()
        seq = max(seq, last.last_seq)


def _group_slices(log: ChangeLog, slices: Sequence[Slice]) -> Iterator[tuple[Slice, Slice]]:
    """Yield groups of slices to read at once: the first and the last of each.

    Commits sealed since the slices were listed share one row group. Read commit by commit, that group would be decoded
    and kept once per commit.
    """
    begin = 0
    while begin < len(slices):
        first, end = slices[begin], begin + 1
        log.seal_index.refresh()
        seal = log.seal_index.covering(first.first)
        while seal and end < len(slices) and slices[end].first <= seal.last and slices[end].table == first.table:
            end += 1
        yield first, slices[end - 1]
        begin = end
