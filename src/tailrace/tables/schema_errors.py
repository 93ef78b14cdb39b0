"""Decide if rows of one schema fit a table of another, and make the error.

One rule: same table, same columns and types in order, same key. A table with another schema must evolve first.
"""

from __future__ import annotations

from tailrace.errors import SchemaChanged
from tailrace.model.schema import TableSchema

RELOAD_HINT = "Its changes are kept in the log. Run `tailrace snapshot FILE TABLE` to reload the table."


IDENTITY_HINT = (
    "Give it one, such as `ALTER TABLE … REPLICA IDENTITY FULL`, and run `tailrace retry FILE TABLE`: the table is "
    "reloaded. Or run `tailrace snapshot FILE TABLE` to continue with its inserts alone."
)
"""Hint for a table whose updates and deletes the source no longer sends."""


REPLACED_HINT = (
    "To keep the past, give the table another `name` in `tables.rules`: it is loaded there, and this lake table stays "
    "as it is. Or run `tailrace snapshot FILE TABLE`: all its rows are replaced."
)
"""Hint for a table that keeps what the source no longer has."""


def schema_mismatch(schema: TableSchema, found: TableSchema, commit: int) -> SchemaChanged | None:
    """Return why rows of the schema `found` cannot go into the table. None if they can."""
    if found.table == schema.table and found.relation == schema.relation and found.same_rows(schema):
        return None
    return SchemaChanged(
        "the source table's schema changed",
        table=schema.table,
        commit=commit,
        change=describe_difference(schema, found),
        hint=RELOAD_HINT,
    )


def describe_difference(old: TableSchema, new: TableSchema) -> str:
    """Describe what changed between two schemas, in a few words."""
    if old.table != new.table:
        return f"renamed to {new.table}"
    if old.relation != new.relation:
        return "dropped and created again"
    before = {column.name: column.type for column in old.columns}
    after = {column.name: column.type for column in new.columns}
    changes = [f"added {name}" for name in after if name not in before]
    changes += [f"dropped {name}" for name in before if name not in after]
    changes += [f"retyped {name}" for name in after if name in before and after[name] != before[name]]
    if old.key != new.key:
        changes.append("another key")
    return ", ".join(changes) or "columns in another order"
