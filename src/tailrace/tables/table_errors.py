"""What a table of any format says to whoever would go on from where it does not stand."""

from __future__ import annotations

from pathlib import Path

from tailrace.errors import ForeignWrite, FormChanged, SchemaChanged, TableUnusable
from tailrace.model.schema import TableSchema
from tailrace.tables.delta.commit_log import REPLACE_HINT, CommitRecord
from tailrace.tables.port import AppliedPosition
from tailrace.tables.spec import TableSpec

ONE_APPLIER = "Stop the other process that applies to it; only one `tailrace run` or `tailrace apply` may."
_GONE_HINT = (
    "Was its folder moved away? Put it back and run `tailrace retry FILE TABLE`: it goes on from where it stood. Where "
    "there is none, that command has the table loaded."
)
_FORM_HINT = "Set it back as it was, or have all that the table holds replaced: `tailrace snapshot FILE TABLE`."


def refuse_other_position(path: Path, position: CommitRecord, schema: TableSchema, expected: AppliedPosition) -> None:
    """Refuse to go on from another position, or with rows of another shape."""
    if position.applied_position != expected:
        raise wrong_position(path, position.applied_position, expected)
    if not position.schema.same_rows(schema):
        raise SchemaChanged("the table was loaded with other columns", table=schema.table, path=path, hint=REPLACE_HINT)


def wrong_position(path: Path, here: AppliedPosition, expected: AppliedPosition) -> ForeignWrite:
    """What an apply that starts from another position is told."""
    return ForeignWrite(
        "the table is not where this apply starts from",
        path=path,
        expected_seq=expected.seq,
        found_seq=here.seq,
        hint=ONE_APPLIER,
    )


def concurrent_commit(path: Path) -> ForeignWrite:
    """What a commit is told that came second."""
    return ForeignWrite("someone else committed to the table at the same time", path=path, hint=ONE_APPLIER)


def refuse_other_replay(path: Path, position: CommitRecord, after: str | None) -> None:
    """Refuse to add what letters hold to a table that others have been added to since it was looked at."""
    if position.replay_id != after:
        raise concurrent_commit(path)


def refuse_other_spec(path: Path, asked: TableSpec, position: CommitRecord) -> None:
    """Refuse a table that was made in another form than the settings ask for."""
    if not asked.is_equivalent(position.spec, position.schema):
        raise FormChanged(
            "the table was made in another form than the settings ask for",
            path=path,
            made=position.spec.described,
            asked=asked.described,
            hint=_FORM_HINT,
        )


def location_taken(path: Path, log: str | None) -> ForeignWrite:
    """What a load is told whose place is taken."""
    return ForeignWrite(
        "a table that this change log did not make already stands here",
        path=path,
        **({"log": log} if log else {}),
        hint="Move it away, or choose another `tables.path` or `tables.names`.",
    )


def table_went_back(path: Path, here: AppliedPosition, expected: AppliedPosition) -> ForeignWrite:
    """What is told of a table that was further already."""
    return ForeignWrite(
        "the table was put back to an older state",
        path=path,
        expected_seq=expected.seq,
        found_seq=here.seq,
        hint="Was its folder restored from a copy? `tailrace retry FILE TABLE` goes on from there, with the log.",
    )


def not_loaded(path: Path) -> TableUnusable:
    """What whoever goes on is told where there is nothing to go on from."""
    return TableUnusable("there is no table here to go on from", path=path, hint=_GONE_HINT)


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
