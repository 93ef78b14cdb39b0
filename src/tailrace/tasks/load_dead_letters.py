"""Rows that a load reads and its table cannot hold, told from the others and set aside.

What must stay true: a row is either staged or a letter, and a letter has all that was read of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.deadletters.keyed import REPLAY_HINT, unfit_cause
from tailrace.deadletters.keyless import EACH_HINT, IMAGE_HINT
from tailrace.deadletters.store import with_causes
from tailrace.errors import DeadLettersFull, TailraceError
from tailrace.model import change
from tailrace.model.change import Operation
from tailrace.model.position import Lsn
from tailrace.model.schema import TableSchema
from tailrace.tables.limits import find_unstorable_rows
from tailrace.tables.spec import LoadOrigin, TableMode, TableSpec
from tailrace.tasks.dead_letters import DEAD_LETTERS_MAX

NO_TRANSACTION = 0
"""Of rows that were read: every snapshot has seen it."""


@dataclass
class LoadRejects:
    """What is set aside of one chunk."""

    schema: TableSchema
    spec: TableSpec
    origin: LoadOrigin
    seen_until: Lsn
    """What the reading saw ended at or before this."""
    count: int = 0
    _found: list[pa.Table] = field(default_factory=list)

    def without_rejects(self, marked: Iterable[tuple[pa.RecordBatch, pa.Array]]) -> Iterator[pa.RecordBatch]:
        """The rows that the table can hold; the others are kept here."""
        by = self.spec.partitions_of(self.schema)
        for rows, unfit in marked:
            unheld, _ = find_unstorable_rows(self.schema, rows.columns, rows.num_rows, by)
            bad = unheld | (pc.list_value_length(unfit).fill_null(0).to_numpy(zero_copy_only=False) > 0)
            if bad.any():
                self._reject(rows.filter(pa.array(bad)), unfit.filter(pa.array(bad)), by)
            yield rows.filter(pa.array(~bad))

    @property
    def dead_letters(self) -> pa.Table:
        """With their causes; there are some."""
        return pa.concat_tables(self._found)

    def keys(self) -> Iterator[pa.RecordBatch]:
        """The keys of the rows that have one which a table could hold."""
        names = [name for name in self.schema.names if name in self.schema.key]
        for letters in self._found:
            found = letters.select([change.stored_name(name) for name in names]).rename_columns(names)
            yield from found.drop_null().to_batches()

    def _reject(self, rows: pa.RecordBatch, unfit: pa.Array, partition_by: dict[str, str]) -> None:
        size = rows.num_rows
        said = {
            change.OP: pa.repeat(Operation.READ.value, size),
            change.SEQ: pa.array(np.arange(size)),
            change.POSITION: pa.repeat(str(self.seen_until), size),
            change.TX: pa.repeat(NO_TRANSACTION, size),
            change.TX_INDEX: pa.repeat(0, size),
            change.COMMITTED_AT: pa.repeat(self.origin.read_at, size),
            change.UNFIT: unfit,
        }
        own = {change.stored_name(name): rows.column(name) for name in self.schema.names}
        fields = self.schema.change_schema()
        columns = {**said, **own}
        made = pa.Table.from_arrays(
            [columns[one.name].cast(one.type) if one.name in columns else pa.nulls(size, one.type) for one in fields],
            schema=fields,
        )
        hint = EACH_HINT if self.spec.mode is TableMode.APPEND else REPLAY_HINT if self.schema.key else IMAGE_HINT
        causes = [unfit_cause(self.schema, made, row, partition_by, hint) for row in range(size)]
        self.count += size
        refuse_too_many(self.schema, self.count, causes[0])
        self._found.append(with_causes(made, causes))


def refuse_too_many(schema: TableSchema, letters: int, first: TailraceError | str) -> None:
    """Raise where a load leaves out more rows than a person could look at."""
    if letters > DEAD_LETTERS_MAX:
        raise DeadLettersFull(
            "more rows of the table do not fit than are set aside",
            table=schema.table,
            letters=letters,
            most=DEAD_LETTERS_MAX,
            first_cause=first if isinstance(first, str) else first.headline,
            hint="Mend the table at the source, or give the column another type; then `tailrace snapshot FILE TABLE`.",
        )
