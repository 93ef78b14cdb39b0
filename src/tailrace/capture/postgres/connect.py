"""Opens connections with our own session settings. No default can change how a value is printed.

A role, a database or the server may have such defaults. Server errors become Tailrace errors here, with the remedy. A
URL's password never leaves this module.
"""

from __future__ import annotations

import select
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple
from urllib.parse import urlsplit

import psycopg
from psycopg import pq
from psycopg.pq.abc import PGconn, PGresult

from tailrace.capture.postgres.address import require_url
from tailrace.errors import (
    POSITION_LOST_HINT,
    PositionLost,
    SlotBusy,
    SourceError,
    SourceNotReady,
    SourceRefused,
    SourceRewritten,
    SourceSlow,
    SourceUnreachable,
    TailraceError,
    Unsupported,
)

CONNECT_SECONDS_MAX = 10

SESSION = (
    "SET datestyle = 'ISO, YMD'; SET intervalstyle = 'postgres'; SET timezone = 'UTC'; SET extra_float_digits = 3; "
    "SET bytea_output = 'hex'; SET xmlbinary = 'base64'; SET client_encoding = 'UTF8'; "
    "SET search_path = 'pg_catalog'; SET quote_all_identifiers = off; SET lc_monetary = 'C'; "
    "SET statement_timeout = 0; SET lock_timeout = 0; SET idle_in_transaction_session_timeout = 0; "
    "SET idle_session_timeout = 0; "
    # Only PostgreSQL 17 and later have it.
    "SELECT set_config('transaction_timeout', '0', false) "
    "WHERE current_setting('transaction_timeout', true) IS NOT NULL; "
    # A load filtered by a policy would be wrong; with this the server refuses instead.
    "SET row_security = off"
)
"""Session settings that decide how values are printed, or could end a long read."""

_AS_IT_IS = "SET client_encoding = 'SQL_ASCII'"

_ARGUMENTS: dict[str, str | int] = {
    "application_name": "tailrace",
    "connect_timeout": CONNECT_SECONDS_MAX,
    "client_encoding": "UTF8",
    # Some data is always unacknowledged, so this and not the keep-alives ends a dead connection.
    "tcp_user_timeout": 60_000,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
}


def connect(url: str) -> psycopg.Connection:
    """Open an ordinary session in autocommit."""
    require_url("url", url)
    try:
        connection = psycopg.connect(url, autocommit=True, **_ARGUMENTS)  # type: ignore[arg-type] # libpq's own names
        connection.execute(SESSION)
    except psycopg.Error as error:
        raise map_error(error, url) from error
    return connection


def connect_replication(url: str) -> PGconn:
    """Open a session for the replication protocol, as bare libpq."""
    require_url("url", url)
    try:
        text = psycopg.conninfo.make_conninfo(url, replication="database", **_ARGUMENTS)
    except psycopg.Error as error:
        raise map_error(error, url) from error
    connection = pq.PGconn.connect(text.encode())
    if connection.status != pq.ConnStatus.OK:
        message = connection.get_error_message()
        connection.finish()
        raise map_error_text(message, url)
    command(connection, SESSION)
    if has_no_encoding(connection):
        command(connection, _AS_IT_IS)
    return connection


@contextmanager
def unchecked_text(connection: PGconn) -> Iterator[None]:
    """Make a server without an encoding send its texts unchecked inside. Any other sends UTF-8 as always.

    Asked for UTF-8, a server without an encoding refuses a text that is not UTF-8, and with it the whole read.
    """
    if not has_no_encoding(connection):
        yield
        return
    command(connection, _AS_IT_IS)
    yield
    command(connection, "SET client_encoding = 'UTF8'")


def has_no_encoding(connection: PGconn) -> bool:
    """Return whether the database stores any bytes as text, and sends them unchanged."""
    return connection.parameter_status(b"server_encoding") == b"SQL_ASCII"


def command(connection: PGconn, text: str) -> list[str | None]:
    """Run a command on a replication session. Return the first row of its result, if any."""
    return _first_row(connection.exec_(text.encode()))


def patient_command(connection: PGconn, text: str) -> list[str | None]:
    """Run a command that waits for other sessions at the server, as `command` does.

    Signals are handled during the wait, and an interruption also cancels the command at the server. Otherwise the
    server would not notice that its client has ended, for as long as it waits.
    """
    poller = select.poll()
    poller.register(connection.socket, select.POLLIN)
    try:
        connection.send_query(text.encode())
        while connection.is_busy():
            poller.poll()
            connection.consume_input()
        result = connection.get_result()
    except psycopg.Error as error:
        raise map_error(error) from error
    except BaseException:
        with suppress(psycopg.Error):
            connection.get_cancel().cancel()
        raise
    assert result is not None, "one was requested"
    return _first_row(result)


def _first_row(result: PGresult) -> list[str | None]:
    if result.status not in (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK, pq.ExecStatus.COPY_BOTH):
        state = result.error_field(pq.DiagnosticField.SQLSTATE) or b""
        raise map_error_text(result.get_error_message(), "", state.decode())
    if result.status != pq.ExecStatus.TUPLES_OK or result.ntuples == 0:
        return []
    cells = [result.get_value(0, column) for column in range(result.nfields)]
    # A timeline's history has names in whatever encoding the server had.
    return [cell.decode(errors="replace") if cell is not None else None for cell in cells]


def map_error(error: psycopg.Error, url: str = "") -> TailraceError:
    """Return the Tailrace error for a server's error."""
    return map_error_text(str(error), url, error.sqlstate or "")


def redacted_url(url: str) -> str:
    """Return the URL without user and password, for messages."""
    try:
        parts = urlsplit(url)
        return f"{parts.hostname or 'localhost'}:{parts.port or 5432}{parts.path}"
    except ValueError:
        return "the source"


INSUFFICIENT_PRIVILEGE = "42501"
"""SQLSTATE of a statement that the role has no right to run. The error has it as a field."""


def map_error_text(message: str, url: str = "", state: str = "") -> TailraceError:
    """Return the Tailrace error for the server's own message and SQLSTATE."""
    text = " ".join(message.split())
    fields = {"source": redacted_url(url)} if url else {}
    for meaning in _ERROR_MAPPINGS:
        if meaning.matches(text, state):
            if state == INSUFFICIENT_PRIVILEGE:
                fields["sqlstate"] = state
            message = f"{meaning.message}: {_shortened(text)}"
            return meaning.kind(message, **fields, hint=meaning.hint).with_option_hint(meaning.option_hint)
    if state.startswith("22") and state != "22012":
        return SourceError(
            "the server could not work with a value",  # its own message would show the value
            **fields,
            sqlstate=state,
            hint="Check the conditions (`--where`, row filters). The server's log has the details.",
        )
    if state and state[:2] not in ("08", "57", "53"):
        return SourceError(
            "the server refused a command: " + _shortened(text),
            **fields,
            sqlstate=state,
            hint="See the server's log for the details.",
        )
    return SourceUnreachable(
        "the server cannot be reached: " + _shortened(text),
        **fields,
        hint="Check that it is running, and that host and port in `source.url` match.",
    ).with_option_hint("Check that it is running, and that host and port in the option `url` match.")


class _ErrorMapping(NamedTuple):
    """A rule for one of the server's errors: its text or SQLSTATE, and our error."""

    kind: type[TailraceError]
    message: str
    hint: str
    says: tuple[str, ...] = ()
    """Any of these texts; one with a `…` needs both sides."""
    states: tuple[str, ...] = ()
    """Any of these, or their first characters."""
    option_hint: str = ""
    """The hint for a reader who has options and no settings file, if it differs."""

    def matches(self, text: str, state: str) -> bool:
        has_text = any(all(part in text for part in words.split("…")) for words in self.says)
        return has_text or state.startswith(self.states)


_ERROR_MAPPINGS = (
    _ErrorMapping(
        SourceRefused, "the server refused the login",
        "Check user and password in `source.url`, and pg_hba.conf on the server.",
        says=("password authentication failed", "no password supplied"), states=("28",),
        option_hint="Check user and password in the option `url`, and pg_hba.conf on the server.",
    ),
    _ErrorMapping(
        SourceRefused, "the database does not exist", "Check the database's name at the end of `source.url`.",
        says=('database "…does not exist',), states=("3D000",),
        option_hint="Check the database's name at the end of the option `url`.",
    ),
    _ErrorMapping(
        Unsupported, "a name in the database is not UTF-8",
        "A database without an encoding (SQL_ASCII) does not check names. Rename it at the source.",
        states=("22021",),
    ),
    _ErrorMapping(
        SourceRefused, "row-level security hides rows from the role",
        "Grant it: ALTER ROLE … BYPASSRLS, or exclude the table.",
        says=("row-level security",),
    ),
    _ErrorMapping(
        SourceRefused, "the role lacks a right",
        "Grant it: ALTER ROLE … REPLICATION, CREATE on the database, ownership of (or SELECT on) the tables; or "
        "create publication and slot yourself and set `create: false` for them.",
        says=("permission denied", "must be superuser", "must be owner"), states=(INSUFFICIENT_PRIVILEGE,),
        option_hint="Grant it: ALTER ROLE … REPLICATION, CREATE on the database, ownership of (or SELECT on) the "
        "tables; or have a pipeline capture, which takes publication and slot that others made, and read its log.",
    ),
    _ErrorMapping(
        SourceUnreachable, "the server has no connection left",
        "Raise max_wal_senders or max_connections, or end sessions that are not needed.",
        says=("max_wal_senders", "too many connections", "remaining connection slots"),
    ),
    _ErrorMapping(
        SlotBusy, "the replication slot is in use",
        "Stop the other reader (see pg_replication_slots.active_pid), then start again.",
        says=("is active for PID",), states=("55006",),
    ),
    _ErrorMapping(
        PositionLost, "the replication slot was invalidated", POSITION_LOST_HINT,
        says=("can no longer get changes from replication slot", "has been invalidated"),
    ),
    _ErrorMapping(
        SourceRefused, "the server has no free replication slot",
        "Raise max_replication_slots (and max_wal_senders) and restart the server.",
        says=("all replication slots are in use",), states=("53400",),
    ),
    _ErrorMapping(
        SourceRefused, "the server refused the login", "Check the user in `source.url`, and pg_hba.conf on the server.",
        says=("no pg_hba.conf entry", "role…does not exist"),
        option_hint="Check the user in the option `url`, and pg_hba.conf on the server.",
    ),
    _ErrorMapping(
        SourceNotReady, "the publications do not agree on what they send of a table",
        "Give the table the same column list and options in each, or take it out of one: "
        "ALTER PUBLICATION … DROP TABLE …;",
        says=("cannot use different",),
    ),
    _ErrorMapping(
        SourceSlow, "the server ended a statement",
        "It is tried again. If it comes back, raise `load.chunk_timeout`, or see who holds locks for so long.",
        states=("57014", "55P03", "40001"),
    ),
    _ErrorMapping(
        # The server's functions look at now, whatever the transaction sees.
        SourceRewritten, "a table was dropped while it was asked for", "It is tried again.",
        says=("could not open relation with OID",),
    ),
)  # fmt: skip
"""The first match counts."""


def _shortened(text: str) -> str:
    """Return the server's own message, at a length that a terminal can show."""
    return text if len(text) <= 300 else text[:299] + "…"
