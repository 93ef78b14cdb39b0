"""All errors that Tailrace raises on purpose. The class is the fact, `remedy` names who acts.

```text
TailraceError
├── ConfigError             the settings file or a request cannot be used
│   └── RuleInvalid             a transform cannot be used on a table
├── TransformFailed         a transform could not be applied to a row
├── Unsupported             the chosen source or format lacks a capability
├── SourceError             the database
│   ├── SourceUnreachable       no connection; retried
│   │   └── SnapshotGone            the session that held a load's snapshot has ended
│   ├── SourceSlow              a statement took too long, or waited too long; retried
│   ├── SourceRewritten         a table was changed while it was read; retried
│   ├── SourceTableMissing      it does not have the table
│   ├── SourceRefused           wrong password, missing database, missing right
│   ├── SourceNotReady          the server is not set up for logical replication
│   ├── SlotBusy                another process reads our slot
│   ├── PositionLost            the server discarded log that we had not read
│   ├── HistoryDiverged         the server's history is not the one the log was read from
│   └── ProtocolViolation       bytes we do not understand
├── LogError                the change log
│   ├── LogUnusable             missing, not writable, or its disk fails
│   │   ├── LogFull                 its disk is full; retried
│   │   └── LogUnreachable          the store that holds it does not answer; retried
│   ├── LogBusy                 another process writes it
│   ├── LogFenced               another writer took our commit number
│   ├── LogForeign              it belongs to another source
│   ├── LogTrimmed              the requested rows are no longer kept
│   ├── LogGap                  changes are missing: discarded by the source unread, or not captured for a while
│   ├── NotCaptured             tables wait for changes, and no capture runs
│   └── LogCorrupt              a checksum or an invariant does not hold
├── StateError              a checkpoint store or a schema history
│   ├── StateUnusable           missing, not writable, or its disk fails
│   │   └── StateFull               its disk is full; retried
│   ├── StateBusy               another process owns it
│   ├── StateFenced             another process took it over
│   ├── StateForeign            the stored state belongs to another source
│   ├── StateCorrupt            a file is not what was written
│   ├── StateTrimmed            the requested version is no longer kept
│   └── PositionRewound         a position does not follow the saved one
├── RuntimeRefused          a runtime cannot do the request in its current state
│   ├── Unacknowledged          a stop was requested while a delivery was not acknowledged
│   └── AckRefused              a token was already used, or belongs to another batch or runtime
├── RuntimeFailed           code that a runtime was configured with failed in an unforeseen way
├── SinkError               a sink
│   ├── SinkUnready             it accepts nothing now; retried
│   └── SinkRejected            it does not accept some of the rows
└── TableError              one lake table; the others continue
    ├── SchemaChanged           the source table's schema changed
    ├── ForeignWrite            another program wrote to the table
    ├── ValueUnfit              a value that the column's type cannot hold
    ├── BaseRowMissing          a partial change without the row that it changes
    ├── DeadLettersFull         one table has more dead letters than are kept
    ├── TableUnusable           the table's folder or format cannot be used
    ├── FormChanged             the table's spec is not the one in the settings
    ├── TableAhead              the table has applied changes that the log does not have
    ├── TableUnpublished        the source does not publish the table's changes
    └── TableFailed             an unforeseen failure
```

Row values and secrets never enter an error. The `code` is stable: scripts and other processes rely on it. The file is
longer than most because the tree is read as a whole.
"""

from __future__ import annotations

import enum
from typing import Self


class Remedy(enum.Enum):
    """The party that acts next."""

    RETRY = "retry"
    """No person: the operation is retried."""
    OPERATOR = "operator"
    """A person: the hint says what to do."""
    NONE = "none"
    """Nothing can repair it: the request itself makes no sense."""


class ExitCode(enum.IntEnum):
    """Meaning of a command's exit status. Documented in docs/reference/cli.md; scripts rely on it."""

    OK = 0
    INTERNAL = 1
    CONFIG = 2
    SOURCE = 3
    LOG = 4
    TABLE = 5
    BUSY = 6
    DIFFERENT = 7
    INTERRUPTED = 130


NEW_LOG_HINT = (
    "Run `tailrace drop FILE`, move the log's folder and the lake tables away, and run again: every table is reloaded."
)
"""The last resort: the log's content can no longer be trusted or continued."""
POSITION_LOST_HINT = (
    "Set `load.mode: when_needed` and start again: every table is reloaded automatically, and readers of the "
    "log see the gap. A program with a checkpoint of its own deletes the checkpoint and reads the tables again "
    "(`snapshot_tables`)."
)
"""The server discarded changes that we had not read."""
PROGRAM_HINT = (
    "A program with a checkpoint of its own deletes the checkpoint, drops its slot (`source.drop()`), and "
    "reads the tables again (`snapshot_tables`)."
)
"""For programs whose position is kept in no log."""
RELOAD_TABLE_HINT = "Run `tailrace snapshot FILE TABLE`: the table is reloaded."


class TailraceError(Exception):
    """Root of all errors. It has a message, a hint for the next action, and identifiers as fields.

    `option_hint` says the same for a reader who uses the options of `format("cdc")` and has no settings file.
    """

    code = "error"
    remedy = Remedy.NONE
    exit_code = ExitCode.INTERNAL
    option_hint = ""

    def __init__(self, message: str, *, hint: str = "", **fields: object) -> None:
        self.message = message
        self.hint = hint
        self.fields = fields
        super().__init__(message)

    def __str__(self) -> str:
        named = ", ".join(f"{name}={value}" for name, value in self.fields.items())
        text = f"{self.message} ({named})" if named else self.message
        return f"{text} [{self.code}]" + (f" | hint: {self.hint}" if self.hint else "")

    @property
    def headline(self) -> str:
        """The message and its fields, without hint or code: the text after `error:`."""
        named = ", ".join(f"{name}={value}" for name, value in self.fields.items())
        return f"{self.message} ({named})" if named else self.message

    def with_option_hint(self, hint: str) -> Self:
        """Set the hint for a reader who has only options, and return the error."""
        self.option_hint = hint
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.hint, self.option_hint, self.fields)


def _rebuild(
    kind: type[TailraceError], message: str, hint: str, option_hint: str, fields: dict[str, object]
) -> TailraceError:
    return kind(message, hint=hint, **fields).with_option_hint(option_hint)


class ConfigError(TailraceError):
    """The settings or the request cannot be used."""

    code = "config-invalid"
    remedy = Remedy.OPERATOR
    exit_code = ExitCode.CONFIG


class RuleInvalid(ConfigError):
    """A transform's rule cannot be used on a table."""

    code = "rule-invalid"


class TransformFailed(TailraceError):
    """A transform's rule could not be applied to a row. The row is not passed on."""

    code = "transform-failed"
    remedy = Remedy.OPERATOR
    exit_code = ExitCode.TABLE


class Unsupported(TailraceError):
    """The source or format does not have this capability."""

    code = "unsupported"
    exit_code = ExitCode.CONFIG


class SourceError(TailraceError):
    """An error of the database."""

    code = "source-error"
    remedy = Remedy.OPERATOR
    exit_code = ExitCode.SOURCE


class SourceUnreachable(SourceError):
    """No connection, or the connection broke."""

    code = "source-unreachable"
    remedy = Remedy.RETRY


class SnapshotGone(SourceUnreachable):
    """The session that held a load's snapshot has ended."""

    code = "snapshot-gone"


class SourceSlow(SourceError):
    """The server ended a statement that took, or waited for a lock, too long."""

    code = "source-slow"
    remedy = Remedy.RETRY


class SourceRewritten(SourceError):
    """A table was rewritten, truncated or its schema changed while it was being read."""

    code = "source-rewritten"
    remedy = Remedy.RETRY


class SourceTableMissing(SourceError):
    """The source does not have the table: it was dropped or renamed, or never existed."""

    code = "source-table-missing"


class SourceRefused(SourceError):
    """The server answered and refused."""

    code = "source-refused"


class SourceNotReady(SourceError):
    """The server is not set up for logical replication."""

    code = "source-not-ready"


class SlotBusy(SourceError):
    """Another process reads our slot. After a broken connection it is often our own predecessor, for a while."""

    code = "slot-busy"
    remedy = Remedy.RETRY
    exit_code = ExitCode.BUSY


class PositionLost(SourceError):
    """The server discarded log that we had not read yet."""

    code = "position-lost"


class HistoryDiverged(SourceError):
    """The server's history branched off before our position. The log holds changes that never happened there."""

    code = "history-diverged"


class ProtocolViolation(SourceError):
    """The server sent bytes that we do not understand."""

    code = "protocol-violation"


class LogError(TailraceError):
    """An error of the change log."""

    code = "log-error"
    remedy = Remedy.OPERATOR
    exit_code = ExitCode.LOG


class LogUnusable(LogError):
    """The log's folder is missing or not writable, or its disk fails."""

    code = "log-unusable"


class LogFull(LogUnusable):
    """The log has no room: the disk is full, or a quota is used up."""

    code = "log-full"
    remedy = Remedy.RETRY


class LogUnreachable(LogUnusable):
    """The object store that holds the log does not answer."""

    code = "log-unreachable"
    remedy = Remedy.RETRY


class LogBusy(LogError):
    """Another process holds the log's lease."""

    code = "log-busy"
    exit_code = ExitCode.BUSY


class LogFenced(LogError):
    """Another writer has committed the number that we were about to write."""

    code = "log-fenced"
    exit_code = ExitCode.BUSY


class LogForeign(LogError):
    """The log belongs to another source."""

    code = "log-foreign"


class LogTrimmed(LogError):
    """The requested rows are no longer kept in the log."""

    code = "log-trimmed"


class LogGap(LogError):
    """Changes are missing between two commits.

    The source had discarded them before they were read, or a table was not captured for a while.
    """

    code = "log-gap"


class NotCaptured(LogError):
    """Tables wait for changes, and no capture runs."""

    code = "not-captured"


class LogCorrupt(LogError):
    """A file of the log is not what was written."""

    code = "log-corrupt"
    damaged_commit = False
    """True: the file of a commit is not what was written."""


class StateError(TailraceError):
    """An error of a checkpoint store or a schema history."""

    code = "state-error"
    remedy = Remedy.OPERATOR
    exit_code = ExitCode.LOG


class StateUnusable(StateError):
    """The store's folder is missing or not writable, or its disk fails."""

    code = "state-unusable"


class StateFull(StateUnusable):
    """The state has no room: the disk is full, or a quota is used up."""

    code = "state-full"
    remedy = Remedy.RETRY


class StateBusy(StateError):
    """Another process owns the state, or one elsewhere did not record its end."""

    code = "state-busy"
    exit_code = ExitCode.BUSY


class StateFenced(StateError):
    """Another process took the state over from this one."""

    code = "state-fenced"
    exit_code = ExitCode.BUSY


class StateForeign(StateError):
    """The state stored under this key belongs to another source, or uses another position type."""

    code = "state-foreign"


class StateCorrupt(StateError):
    """A file is not what was written, or has an unknown format. It is never taken for an empty state."""

    code = "state-corrupt"


class StateTrimmed(StateError):
    """The requested version of a table's schema is no longer kept."""

    code = "state-trimmed"


class PositionRewound(StateError):
    """A position does not follow the saved one. The changes between would arrive twice, or never."""

    code = "position-rewound"


class RuntimeRefused(TailraceError):
    """A runtime cannot do what was requested in its current state."""

    code = "runtime-refused"
    exit_code = ExitCode.CONFIG


class Unacknowledged(RuntimeRefused):
    """A stop was requested while a delivered batch or an injected change was not acknowledged."""

    code = "unacknowledged"
    remedy = Remedy.OPERATOR


class AckRefused(RuntimeRefused):
    """The token was already used, or does not belong to the batch under way. Nothing was acknowledged."""

    code = "ack-refused"


class RuntimeFailed(TailraceError):
    """A function, store, source or sink of a runtime has raised a foreign error.

    Observers and the verdict get this error. The runtime raises the original failure itself, which is its cause.
    """

    code = "runtime-failed"
    remedy = Remedy.OPERATOR


class SinkError(TailraceError):
    """An error of a sink; nothing of what it received counts as delivered."""

    code = "sink-error"
    remedy = Remedy.OPERATOR
    exit_code = ExitCode.LOG


class SinkUnready(SinkError):
    """The sink accepts nothing for the moment."""

    code = "sink-unready"
    remedy = Remedy.RETRY


class SinkRejected(SinkError):
    """The sink rejects some rows, and no handler for rejected rows is configured."""

    code = "sink-rejected"


class TableError(TailraceError):
    """An error of one lake table; the others continue."""

    code = "table-error"
    remedy = Remedy.OPERATOR
    exit_code = ExitCode.TABLE


class SchemaChanged(TableError):
    """The source table's schema changed.

    A policy says to stop, or only a reload can follow the change.
    """

    code = "schema-changed"


class ForeignWrite(TableError):
    """The table's newest commit is neither ours nor known maintenance."""

    code = "foreign-write"


class ValueUnfit(TableError):
    """A value that the column's type cannot hold; the log keeps it as text."""

    code = "value-unfit"


class BaseRowMissing(TableError):
    """A partial change arrived for a row that the table does not hold."""

    code = "base-row-missing"


class DeadLettersFull(TableError):
    """One table has more dead letters than are kept. The table needs a person, not a single row."""

    code = "dead-letters-full"


class TableUnusable(TableError):
    """The table's folder or format cannot be used."""

    code = "table-unusable"


class FormChanged(TableError):
    """The table was created with another spec than the settings ask for now."""

    code = "form-changed"


class TableAhead(TableError):
    """The table has applied more than the log holds. One of the two was restored from a copy."""

    code = "table-ahead"


class TableUnpublished(TableError):
    """The source does not publish the table's changes, so it must not be loaded."""

    code = "table-unpublished"
    remedy = Remedy.RETRY


class TableFailed(TableError):
    """An unforeseen failure; it is retried, and the other tables continue."""

    code = "unexpected"
    remedy = Remedy.RETRY


def _tree(root: type[TailraceError]) -> dict[str, type[TailraceError]]:
    classes = {root.code: root}
    for child in root.__subclasses__():
        classes.update(_tree(child))
    return classes


def error_class(code: str) -> type[TailraceError]:
    """Return the class of a code; the root for an unknown code."""
    return _tree(TailraceError).get(code, TailraceError)
