"""The parts of a change: its operation, and the metadata columns that every change has.

`_seq` orders everything; no other column may be used to sort. Optional columns (`_unchanged`, `_before`, `_moved_from`,
`_unfit`) may be left out of a stored batch when they are null in every row, and only then.
"""

from __future__ import annotations

import enum

import pyarrow as pa


class Operation(enum.Enum):
    """The kind of change of a row. The value is the one stored in `_op`."""

    INSERT = "insert"
    UPDATE = "update"
    DELETE = "delete"
    TRUNCATE = "truncate"
    READ = "read"
    """Read by a snapshot, not seen in the source's log."""
    SCHEMA = "schema"
    """A table has a new schema version; only in the system stream `schema`."""
    MESSAGE = "message"
    """A message that an application wrote into the source's log. It is only in the system stream `message`."""

    @property
    def code(self) -> int:
        """The small number that the compiled kernels use."""
        return _CODES[self]


_CODES = {operation: code for code, operation in enumerate(Operation)}

OPERATION_NAMES = pa.array([operation.value for operation in Operation], pa.string())
"""`_op` by code: `OPERATION_NAMES.take(codes)`."""

OP, SEQ, COMMIT, POSITION = "_op", "_seq", "_commit", "_position"
TX, TX_INDEX, COMMITTED_AT = "_tx", "_tx_index", "_committed_at"
UNCHANGED, BEFORE, MOVED_FROM, UNFIT = "_unchanged", "_before", "_moved_from", "_unfit"

REQUIRED = (
    pa.field(OP, pa.string(), nullable=False),
    pa.field(SEQ, pa.int64(), nullable=False),
    pa.field(POSITION, pa.string(), nullable=False),
    pa.field(TX, pa.int64(), nullable=False),
    pa.field(TX_INDEX, pa.int32(), nullable=False),
    pa.field(COMMITTED_AT, pa.timestamp("us", "UTC"), nullable=False),
)
"""Stored with every change. `_commit` is the number of the file that holds the change, so it is not stored."""

UNFIT_TYPE = pa.list_(pa.struct([("column", pa.string()), ("text", pa.string())]))
_BY_RULE = "\0rule "
OPTIONAL = (UNCHANGED, BEFORE, MOVED_FROM, UNFIT)
RESERVED = frozenset([field.name for field in REQUIRED] + [COMMIT, *OPTIONAL])


def rule_failure_text(rule: str, why: str) -> str:
    """Return the `_unfit` text of a value that a transform's rule failed on. No source's text begins with it."""
    return f"{_BY_RULE}{rule}: {why}"


def parse_rule_failure(text: str) -> str | None:
    """Return the failed rule and the reason, if an unfit value's text contains them."""
    return text.removeprefix(_BY_RULE) if text.startswith(_BY_RULE) else None


def stored_name(column: str) -> str:
    """Return the column's name inside the log. It is its own, unless a metadata column has that name.

    A trailing underscore is added to every name that is a reserved one plus underscores, so that two columns never
    collide.
    """
    return column + "_" if column.rstrip("_") in RESERVED or column in RESERVED else column
