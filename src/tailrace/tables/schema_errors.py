"""Whether rows of one shape can go into a table of another, and what to say if they cannot.

One rule: same table, same columns and types in order, same key. A table that has another shape evolves first.
"""

from __future__ import annotations

from tailrace.errors import SchemaChanged
from tailrace.model.schema import TableSchema

RELOAD_HINT = "Its changes are kept in the log. Run `tailrace snapshot FILE TABLE`: the table is loaded anew."

IDENTITY_HINT = (
    "Give it one, such as `ALTER TABLE … REPLICA IDENTITY FULL`, and run `tailrace retry FILE TABLE`: the table is "
    "loaded anew. Or run `tailrace snapshot FILE TABLE`, and it goes on with its inserts alone."
)
"""Of a table whose updates and deletes are no longer told."""

REPLACED_HINT = (
    "To keep the past where it is, give the table another `name` in `tables.rules`: it is loaded there, and this one "
    "stays. Or run `tailrace snapshot FILE TABLE`: all that it holds is replaced."
)
"""Of a table that keeps what the source no longer has."""


def schema_mismatch(shape: TableSchema, found: TableSchema, commit: int) -> SchemaChanged | None:
    """Why rows of the shape found cannot go into a table of this shape; None if they can."""
    if found.table == shape.table and found.relation == shape.relation and found.same_rows(shape):
        return None
    return SchemaChanged(
        "the source table changed its shape",
        table=shape.table,
        commit=commit,
        change=describe_difference(shape, found),
        hint=RELOAD_HINT,
    )


def describe_difference(old: TableSchema, new: TableSchema) -> str:
    """What changed between two shapes, in a few words."""
    if old.table != new.table:
        return f"renamed to {new.table}"
    if old.relation != new.relation:
        return "dropped and created again"
    before = {column.name: column.type for column in old.columns}
    after = {column.name: column.type for column in new.columns}
    said = [f"added {name}" for name in after if name not in before]
    said += [f"dropped {name}" for name in before if name not in after]
    said += [f"retyped {name}" for name in after if name in before and after[name] != before[name]]
    if old.key != new.key:
        said.append("another key")
    return ", ".join(said) or "columns in another order"
