"""A condition that a person wrote, looked at by the server before anything is read with it.

It must stand by itself, for a load joins it to conditions of its own. So the server reads it once between parentheses
and once between brackets: text that closes the one cannot close the other. Nothing is run, so no value of a row can
stand in what the server says about it.
"""

from __future__ import annotations

import psycopg
from psycopg import pq

from tailrace.capture.postgres.chunks import find_leaves
from tailrace.capture.postgres.connect import map_error, map_error_text
from tailrace.errors import ConfigError, SourceSlow, SourceTableMissing
from tailrace.model.schema import TableSchema

_HINT = "It is what would follow WHERE, for example \"status = 'open'\"; names outside pg_catalog need their schema."
_LOCKED = "55P03"
_SYNTAX = "42601"


def require_valid_condition(connection: psycopg.Connection, schema: TableSchema, condition: str) -> None:
    """Raise ConfigError, with the server's words, unless rows of the table can be picked with this condition."""
    try:
        text = condition.encode()
    except UnicodeEncodeError:
        raise _refused(schema, "it is not UTF-8") from None
    if not condition.strip() or b"\0" in text:
        raise _refused(schema, "it is empty")
    try:
        with connection.transaction():
            connection.execute("set transaction read only")
            # As a load reads it: of a partitioned table, from a partition.
            leaves = find_leaves(connection, schema)
            if not leaves:
                raise SourceTableMissing("the table is not there any more", table=schema.table, hint="Was it dropped?")
            rows = leaves[0].rows_sql.as_bytes(connection)
            # A comment at the end of the condition must not swallow what closes it.
            _prepare(connection, schema, b"select 1 from " + rows + b" where (" + text + b"\n)")
            _prepare(connection, schema, b"select array[" + text + b"\n] from " + rows, apart=True)
    except psycopg.errors.LockNotAvailable as error:
        raise _locked(schema) from error
    except psycopg.Error as error:
        raise map_error(error) from error


def _prepare(connection: psycopg.Connection, schema: TableSchema, query: bytes, *, apart: bool = False) -> None:
    """Have the server read one statement, and look at its names and types; it takes several for an error."""
    session = connection.pgconn
    result = session.prepare(b"", query)
    if result.status == pq.ExecStatus.COMMAND_OK:
        if session.describe_prepared(b"").nparams:
            raise _refused(schema, "it has parameters such as $1, which stand for nothing here")
        return
    state = (result.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()
    if apart and state == _SYNTAX:
        raise _refused(schema, "it does not stand by itself: it must be one expression, its parentheses closed")
    if state == _LOCKED:
        raise _locked(schema)
    if state[:2] not in ("22", "42", "0A", "54"):
        raise map_error_text(result.get_error_message(), state=state)
    fields = (pq.DiagnosticField.MESSAGE_PRIMARY, pq.DiagnosticField.MESSAGE_HINT)
    said = [found.decode(errors="replace") for field in fields if (found := result.error_field(field))]
    raise _refused(schema, ". ".join(said))


def _refused(schema: TableSchema, why: str) -> ConfigError:
    return ConfigError(f"the condition cannot be used: {why}", table=schema.table, hint=_HINT)


def _locked(schema: TableSchema) -> SourceSlow:
    return SourceSlow(
        "somebody holds the table locked, so the condition could not be looked at",
        table=schema.table,
        hint="Wait for the ALTER TABLE, TRUNCATE or LOCK that holds it to end, and ask again.",
    )
