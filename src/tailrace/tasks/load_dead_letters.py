"""Split off the rows of a load that the table cannot hold, as dead letters.

Invariant: a row is either staged or a dead letter, and a dead letter has everything that was read of its row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.deadletters.keyed import REPLAY_HINT, unfit_cause
from tailrace.deadletters.keyless import EACH_HINT, IMAGE_HINT
from tailrace.deadletters.step_file import with_causes
from tailrace.errors import DeadLettersFull, TailraceError
from tailrace.model import change
from tailrace.model.change import Operation
from tailrace.model.position import Lsn
from tailrace.model.schema import TableSchema
from tailrace.tables.limits import find_unstorable_rows
from tailrace.tables.spec import LoadOrigin, TableMode, TableSpec
from tailrace.tasks.dead_letters import DEAD_LETTERS_MAX

NO_TRANSACTION = 0
"""Transaction id of rows that a load read; every snapshot sees it."""


@dataclass
class LoadRejects:
    """Dead letters of one chunk."""

    schema: TableSchema
    spec: TableSpec
    origin: LoadOrigin
    seen_until: Lsn
    """Position at or before which everything in the chunk's snapshot was committed."""
    count: int = 0
    _found: list[pa.Table] = field(default_factory=list)

    def without_rejects(self, marked: Iterable[tuple[pa.RecordBatch, pa.Array]]) -> Iterator[pa.RecordBatch]:
        """Yield the rows that the table can hold, and keep the others here."""
        partition_by = self.spec.partitions_of(self.schema)
        for rows, unfit in marked:
            unstorable, _ = find_unstorable_rows(self.schema, rows.columns, rows.num_rows, partition_by)
            bad = unstorable | (pc.list_value_length(unfit).fill_null(0).to_numpy(zero_copy_only=False) > 0)
            if bad.any():
                self._reject(rows.filter(pa.array(bad)), unfit.filter(pa.array(bad)), partition_by)
            yield rows.filter(pa.array(~bad))

    @property
    def dead_letters(self) -> pa.Table:
        """Rejected rows with their causes; only if `count` is not 0."""
        return pa.concat_tables(self._found)

    def keys(self) -> Iterator[pa.RecordBatch]:
        """Yield the keys of the rejected rows, except keys that the table could not hold."""
        names = [name for name in self.schema.names if name in self.schema.key]
        for rejects in self._found:
            keys = rejects.select([change.stored_name(name) for name in names]).rename_columns(names)
            yield from keys.drop_null().to_batches()

    def _reject(self, rows: pa.RecordBatch, unfit: pa.Array, partition_by: dict[str, str]) -> None:
        size = rows.num_rows
        metadata = {
            change.OP: pa.repeat(Operation.READ.value, size),
            change.SEQ: pa.array(np.arange(size)),
            change.POSITION: pa.repeat(str(self.seen_until), size),
            change.TX: pa.repeat(NO_TRANSACTION, size),
            change.TX_INDEX: pa.repeat(0, size),
            change.COMMITTED_AT: pa.repeat(self.origin.read_at, size),
            change.UNFIT: unfit,
        }
        values = {change.stored_name(name): rows.column(name) for name in self.schema.names}
        fields = self.schema.change_schema()
        columns = {**metadata, **values}
        changes = pa.Table.from_arrays(
            [
                columns[field.name].cast(field.type) if field.name in columns else pa.nulls(size, field.type)
                for field in fields
            ],
            schema=fields,
        )
        hint = EACH_HINT if self.spec.mode is TableMode.APPEND else REPLAY_HINT if self.schema.key else IMAGE_HINT
        causes = [unfit_cause(self.schema, changes, row, partition_by, hint) for row in range(size)]
        self.count += size
        refuse_too_many(self.schema, self.count, causes[0])
        self._found.append(with_causes(changes, causes))


def refuse_too_many(schema: TableSchema, count: int, first_cause: TailraceError | str) -> None:
    """Raise if a load rejects more rows than a person could look at."""
    if count > DEAD_LETTERS_MAX:
        raise DeadLettersFull(
            "the load has too many dead letters",
            table=schema.table,
            letters=count,
            most=DEAD_LETTERS_MAX,
            first_cause=first_cause if isinstance(first_cause, str) else first_cause.headline,
            hint="Correct the rows at the source, or give the column another type. Then run `tailrace snapshot FILE "
            "TABLE`.",
        )
