"""Lets the server check a person's condition before anything is read with it.

The condition must be complete on its own, for a load joins it to conditions of its own. So the server parses it once
between parentheses and once between brackets: text that closes the one cannot close the other. Nothing is executed, so
the server's messages cannot contain a row's value.
"""

from __future__ import annotations

import psycopg
from psycopg import pq

from tailrace.capture.postgres.chunks import find_leaves
from tailrace.capture.postgres.connect import map_error, map_error_text
from tailrace.errors import ConfigError, SourceSlow, SourceTableMissing
from tailrace.model.schema import TableSchema

_HINT = "Give what would follow WHERE, for example \"status = 'open'\"; names outside pg_catalog need their schema."
_LOCKED = "55P03"
_SYNTAX = "42601"


def require_valid_condition(connection: psycopg.Connection, schema: TableSchema, condition: str) -> None:
    """Raise ConfigError, with the server's message, unless this condition can select rows of the table."""
    try:
        text = condition.encode()
    except UnicodeEncodeError:
        raise _refused(schema, "it is not UTF-8") from None
    if not condition.strip() or b"\0" in text:
        raise _refused(schema, "it is empty")
    try:
        with connection.transaction():
            connection.execute("set transaction read only")
            # As a load reads it: for a partitioned table, from a partition.
            leaves = find_leaves(connection, schema)
            if not leaves:
                raise SourceTableMissing(
                    "the table no longer exists", table=schema.table, hint="Check whether it was dropped."
                )
            rows = leaves[0].rows_sql.as_bytes(connection)
            # A comment at the end of the condition must not swallow what closes it.
            _prepare(connection, schema, b"select 1 from " + rows + b" where (" + text + b"\n)")
            _prepare(connection, schema, b"select array[" + text + b"\n] from " + rows, as_element=True)
    except psycopg.errors.LockNotAvailable as error:
        raise _locked(schema) from error
    except psycopg.Error as error:
        raise map_error(error) from error


def _prepare(connection: psycopg.Connection, schema: TableSchema, query: bytes, *, as_element: bool = False) -> None:
    """Let the server parse one statement, and check its names and types. Several statements are an error."""
    session = connection.pgconn
    result = session.prepare(b"", query)
    if result.status == pq.ExecStatus.COMMAND_OK:
        if session.describe_prepared(b"").nparams:
            raise _refused(schema, "it has parameters such as $1, which have no value here")
        return
    state = (result.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()
    if as_element and state == _SYNTAX:
        raise _refused(schema, "it must be one complete expression, with its parentheses closed")
    if state == _LOCKED:
        raise _locked(schema)
    if state[:2] not in ("22", "42", "0A", "54"):
        raise map_error_text(result.get_error_message(), state=state)
    fields = (pq.DiagnosticField.MESSAGE_PRIMARY, pq.DiagnosticField.MESSAGE_HINT)
    messages = [part.decode(errors="replace") for field in fields if (part := result.error_field(field))]
    raise _refused(schema, ". ".join(messages))


def _refused(schema: TableSchema, why: str) -> ConfigError:
    return ConfigError(f"the condition cannot be used: {why}", table=schema.table, hint=_HINT)


def _locked(schema: TableSchema) -> SourceSlow:
    return SourceSlow(
        "the condition could not be checked: another session has locked the table",
        table=schema.table,
        hint="Wait for the ALTER TABLE, TRUNCATE or LOCK that holds the lock to end, and try again.",
    )
