"""Errors that Delta and Iceberg tables share, raised when a table is not as expected."""

from __future__ import annotations

from pathlib import Path

from tailrace.errors import ForeignWrite, FormChanged, SchemaChanged, TableUnusable
from tailrace.model.schema import TableSchema
from tailrace.tables.delta.commit_log import REPLACE_HINT, CommitRecord
from tailrace.tables.port import AppliedPosition
from tailrace.tables.spec import TableSpec

ONE_APPLIER = "Stop the other process that applies to it; only one `tailrace run` or `tailrace apply` may."
_GONE_HINT = (
    "If the folder was moved away, put it back and run `tailrace retry FILE TABLE`: the table continues from its "
    "applied position. Without a folder, that command loads the table."
)
_SPEC_HINT = "Restore the previous settings, or replace the whole table: `tailrace snapshot FILE TABLE`."


def refuse_other_position(path: Path, record: CommitRecord, schema: TableSchema, expected: AppliedPosition) -> None:
    """Refuse to apply from another position, or to write rows with another schema."""
    if record.applied_position != expected:
        raise wrong_position(path, record.applied_position, expected)
    if not record.schema.same_rows(schema):
        raise SchemaChanged("the table was loaded with other columns", table=schema.table, path=path, hint=REPLACE_HINT)


def wrong_position(path: Path, here: AppliedPosition, expected: AppliedPosition) -> ForeignWrite:
    """Return the error for an apply that starts from another position than the table's."""
    return ForeignWrite(
        "the table is not at the position that this apply starts from",
        path=path,
        expected_seq=expected.seq,
        found_seq=here.seq,
        hint=ONE_APPLIER,
    )


def concurrent_commit(path: Path) -> ForeignWrite:
    """Return the error for a commit that another commit preceded."""
    return ForeignWrite("someone else committed to the table at the same time", path=path, hint=ONE_APPLIER)


def refuse_other_replay(path: Path, record: CommitRecord, after: str | None) -> None:
    """Refuse to append a replay's rows if another replay has been committed since."""
    if record.replay_id != after:
        raise concurrent_commit(path)


def refuse_other_spec(path: Path, asked: TableSpec, record: CommitRecord) -> None:
    """Refuse a table that was made with another table spec than the settings ask for."""
    if not asked.is_equivalent(record.spec, record.schema):
        raise FormChanged(
            "the table was made with another table spec than the settings ask for",
            path=path,
            made=record.spec.described,
            asked=asked.described,
            hint=_SPEC_HINT,
        )


def location_taken(path: Path, log: str | None) -> ForeignWrite:
    """Return the error for a load into a folder that holds another log's table."""
    return ForeignWrite(
        "the folder holds a table that this change log did not make",
        path=path,
        **({"log": log} if log else {}),
        hint="Move it away, or choose another `tables.path` or `tables.names`.",
    )


def table_went_back(path: Path, here: AppliedPosition, expected: AppliedPosition) -> ForeignWrite:
    """Return the error for a table that is behind a position it had already reached."""
    return ForeignWrite(
        "the table is at an older state than before",
        path=path,
        expected_seq=expected.seq,
        found_seq=here.seq,
        hint="If its folder was restored from a copy, run `tailrace retry FILE TABLE`: it continues from there, with "
        "the log.",
    )


def not_loaded(path: Path) -> TableUnusable:
    """Return the error for a folder without a table that has our position."""
    return TableUnusable("there is no table here to continue from", path=path, hint=_GONE_HINT)
