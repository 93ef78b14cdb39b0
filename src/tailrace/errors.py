"""Every error Tailrace raises on purpose: the class is the fact, `remedy` says who acts next.

```text
TailraceError
├── ConfigError             the settings file, or a question that makes no sense
│   └── RuleInvalid             a transform cannot be used on a table
├── TransformFailed         a transform could not be applied to a row
├── Unsupported             a capability the chosen source or format does not have
├── SourceError             the database
│   ├── SourceUnreachable       no connection; retried
│   │   └── SnapshotGone            the session that held a load's snapshot has ended
│   ├── SourceSlow              a statement took too long, or waited too long; retried
│   ├── SourceRewritten         a table was changed while it was read; retried
│   ├── SourceTableMissing      it does not have the table
│   ├── SourceRefused           wrong password, missing database, missing right
│   ├── SourceNotReady          the server is not set up for logical replication
│   ├── SlotBusy                another process reads our slot
│   ├── PositionLost            the server discarded log we had not read
│   ├── HistoryDiverged         the server's history is not the one the log was read from
│   └── ProtocolViolation       bytes we do not understand
├── LogError                the change log
│   ├── LogUnusable             missing, not writable, its disk fails
│   │   ├── LogFull                 its disk is full; retried
│   │   └── LogUnreachable          the store that holds it does not answer; retried
│   ├── LogBusy                 another process writes it
│   ├── LogFenced               another writer took our commit number
│   ├── LogForeign              it belongs to another source
│   ├── LogTrimmed              what was asked for is no longer kept
│   ├── LogGap                  changes are missing: discarded by the source unread, or not captured for a while
│   ├── NotCaptured             tables wait for changes that nobody captures
│   └── LogCorrupt              a checksum or an invariant does not hold
├── StateError              a checkpoint store or a schema history
│   ├── StateUnusable           missing, not writable, its disk fails
│   │   └── StateFull               its disk is full; retried
│   ├── StateBusy               another process owns it
│   ├── StateFenced             another process took it over
│   ├── StateForeign            what is saved there is of another source
│   ├── StateCorrupt            a file is not what was written
│   ├── StateTrimmed            what was asked for is no longer kept
│   └── PositionRewound         a position that does not follow the one that is saved
├── RuntimeRefused          a runtime was asked for what does not go with its state
│   ├── Unacknowledged          it was to stop, and something was not acknowledged
│   └── AckRefused              a token that was used, or is of another batch or runtime
├── RuntimeFailed           what a runtime was given to use has failed in a way nobody foresaw
├── SinkError               a sink
│   ├── SinkUnready             it takes nothing now; retried
│   └── SinkRejected            it does not take some of the rows
└── TableError              one lake table; the others go on
    ├── SchemaChanged           the source table changed its shape
    ├── ForeignWrite            someone else wrote to the table
    ├── ValueUnfit              a value the column's type cannot hold
    ├── BaseRowMissing          a partial change without the row it changes
    ├── DeadLettersFull         more changes were set aside than are kept for one table
    ├── TableUnusable           the table's folder or format cannot be used
    ├── FormChanged             it was made in another form than the settings say
    ├── TableAhead              it has applied what the log does not have
    ├── TableUnpublished        the source does not publish its changes
    └── TableFailed             a failure nobody foresaw
```

Row values and secrets never enter an error. The `code` is stable: scripts and other processes go by it. The file is
longer than most because the tree is read as a whole.
"""

from __future__ import annotations

import enum


class Remedy(enum.Enum):
    """Who acts next."""

    RETRY = "retry"
    """Nobody: it is tried again."""
    OPERATOR = "operator"
    """A person, who is told what to do by the hint."""
    NONE = "none"
    """It cannot be mended: the request itself makes no sense."""


class ExitCode(enum.IntEnum):
    """What a command's exit status means. Documented in docs/reference/cli.md; scripts rely on it."""

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
    "Run `tailrace drop FILE`, move the log's folder and the lake tables away, and run again: every table is "
    "loaded anew."
)
"""The last resort: what is in the log can no longer be trusted or continued."""
POSITION_LOST_HINT = (
    "Set `load.mode: when_needed` and start again: every table is loaded anew by itself, and whoever follows the log "
    "is told. A program with a checkpoint of its own deletes that, and reads the tables anew (`snapshot_tables`)."
)
"""The server discarded changes that we had not read."""
PROGRAM_HINT = (
    "A program with a checkpoint of its own deletes that, drops its slot (`source.drop()`), and reads the tables anew "
    "(`snapshot_tables`)."
)
"""What those do whom no log keeps the place of."""
RELOAD_TABLE_HINT = "Run `tailrace snapshot FILE TABLE`: the table is loaded anew."


class TailraceError(Exception):
    """The root: a message, a hint that says what to do, and identifiers as fields."""

    code = "error"
    remedy = Remedy.NONE
    exit_code = ExitCode.INTERNAL

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
        """The message and its fields, without hint or code: what follows `error:`."""
        named = ", ".join(f"{name}={value}" for name, value in self.fields.items())
        return f"{self.message} ({named})" if named else self.message

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.hint, self.fields)


def _rebuild(kind: type[TailraceError], message: str, hint: str, fields: dict[str, object]) -> TailraceError:
    return kind(message, hint=hint, **fields)


class ConfigError(TailraceError):
    """The settings, or the question asked, cannot be used."""

    code = "config-invalid"
    remedy = Remedy.OPERATOR
    exit_code = ExitCode.CONFIG


class RuleInvalid(ConfigError):
    """A transform's rule cannot be used on a table."""

    code = "rule-invalid"


class TransformFailed(TailraceError):
    """A transform's rule could not be applied to a row, which is not let through."""

    code = "transform-failed"
    remedy = Remedy.OPERATOR
    exit_code = ExitCode.TABLE


class Unsupported(TailraceError):
    """The source or format does not have this capability."""

    code = "unsupported"
    exit_code = ExitCode.CONFIG


class SourceError(TailraceError):
    """Something about the database."""

    code = "source-error"
    remedy = Remedy.OPERATOR
    exit_code = ExitCode.SOURCE


class SourceUnreachable(SourceError):
    """No connection, or it broke."""

    code = "source-unreachable"
    remedy = Remedy.RETRY


class SnapshotGone(SourceUnreachable):
    """The session that held a load's snapshot has ended."""

    code = "snapshot-gone"


class SourceSlow(SourceError):
    """The server ended a statement because it took too long, or waited too long for a lock."""

    code = "source-slow"
    remedy = Remedy.RETRY


class SourceRewritten(SourceError):
    """A table was rewritten, truncated or given another shape while it was being read."""

    code = "source-rewritten"
    remedy = Remedy.RETRY


class SourceTableMissing(SourceError):
    """The source does not have the table: it was dropped, renamed, or never there."""

    code = "source-table-missing"


class SourceRefused(SourceError):
    """The server answered, and said no."""

    code = "source-refused"


class SourceNotReady(SourceError):
    """The server is not set up for logical replication."""

    code = "source-not-ready"


class SlotBusy(SourceError):
    """Another process is reading our slot; after a broken connection, often our own predecessor for a while."""

    code = "slot-busy"
    remedy = Remedy.RETRY
    exit_code = ExitCode.BUSY


class PositionLost(SourceError):
    """The server discarded log we had not read yet."""

    code = "position-lost"


class HistoryDiverged(SourceError):
    """The server's history branched off before our position: the log holds what never happened there."""

    code = "history-diverged"


class ProtocolViolation(SourceError):
    """The server sent bytes that mean nothing to us."""

    code = "protocol-violation"


class LogError(TailraceError):
    """Something about the change log."""

    code = "log-error"
    remedy = Remedy.OPERATOR
    exit_code = ExitCode.LOG


class LogUnusable(LogError):
    """The log's folder is missing or not writable, or its disk fails."""

    code = "log-unusable"


class LogFull(LogUnusable):
    """There is no room for the log: the disk is full, or a quota is used up."""

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
    """Another writer has committed the number we were about to write."""

    code = "log-fenced"
    exit_code = ExitCode.BUSY


class LogForeign(LogError):
    """The log belongs to another source."""

    code = "log-foreign"


class LogTrimmed(LogError):
    """Rows that were asked for are no longer kept in the log."""

    code = "log-trimmed"


class LogGap(LogError):
    """Changes are missing between two commits: the source had discarded them before they were read, or a table was not
    captured for a while."""

    code = "log-gap"


class NotCaptured(LogError):
    """Tables wait for changes that nobody captures."""

    code = "not-captured"


class LogCorrupt(LogError):
    """A file of the log is not what was written."""

    code = "log-corrupt"


class StateError(TailraceError):
    """Something about a checkpoint store or a schema history."""

    code = "state-error"
    remedy = Remedy.OPERATOR
    exit_code = ExitCode.LOG


class StateUnusable(StateError):
    """Its folder is missing or not writable, or its disk fails."""

    code = "state-unusable"


class StateFull(StateUnusable):
    """There is no room for it: the disk is full, or a quota is used up."""

    code = "state-full"
    remedy = Remedy.RETRY


class StateBusy(StateError):
    """Another process owns it, or one on another host that did not say that it has ended."""

    code = "state-busy"
    exit_code = ExitCode.BUSY


class StateFenced(StateError):
    """Another process took it over from this one."""

    code = "state-fenced"
    exit_code = ExitCode.BUSY


class StateForeign(StateError):
    """What is saved under this key is of another source, or counts in other positions."""

    code = "state-foreign"


class StateCorrupt(StateError):
    """A file is not what was written, or not of a format that this version knows. It is never taken for none."""

    code = "state-corrupt"


class StateTrimmed(StateError):
    """A version of a table's shape that is no longer kept."""

    code = "state-trimmed"


class PositionRewound(StateError):
    """A position that does not follow the one that is saved: what lies between would come twice, or never."""

    code = "position-rewound"


class RuntimeRefused(TailraceError):
    """A runtime was asked for something that does not go with its state."""

    code = "runtime-refused"
    exit_code = ExitCode.CONFIG


class Unacknowledged(RuntimeRefused):
    """It was to stop while something that was handed out, or given to it, was not acknowledged."""

    code = "unacknowledged"
    remedy = Remedy.OPERATOR


class AckRefused(RuntimeRefused):
    """The token was used before, or is not that of the batch under way. Nothing was acknowledged."""

    code = "ack-refused"


class RuntimeFailed(TailraceError):
    """A function, store, source or sink that a runtime uses has raised what is none of our errors. It is told to
    observers, and stands in the verdict; what is raised is the failure itself, which is its cause."""

    code = "runtime-failed"
    remedy = Remedy.OPERATOR


class SinkError(TailraceError):
    """Something about a sink; nothing that it was given counts as delivered."""

    code = "sink-error"
    remedy = Remedy.OPERATOR
    exit_code = ExitCode.LOG


class SinkUnready(SinkError):
    """It takes nothing for the moment."""

    code = "sink-unready"
    remedy = Remedy.RETRY


class SinkRejected(SinkError):
    """It does not take some of the rows, and nobody was named to set them aside."""

    code = "sink-rejected"


class TableError(TailraceError):
    """Something about one lake table; the others go on."""

    code = "table-error"
    remedy = Remedy.OPERATOR
    exit_code = ExitCode.TABLE


class SchemaChanged(TableError):
    """The source table changed its shape, and the settings say to stop, or only a load brings what it has now."""

    code = "schema-changed"


class ForeignWrite(TableError):
    """The table's newest commit is neither ours nor known maintenance."""

    code = "foreign-write"


class ValueUnfit(TableError):
    """A value that the column's type cannot hold; it is kept, as text, in the log."""

    code = "value-unfit"


class BaseRowMissing(TableError):
    """A partial change arrived for a row that the table does not hold."""

    code = "base-row-missing"


class DeadLettersFull(TableError):
    """More changes of one table could not be applied than are set aside: the table needs a person, not a row."""

    code = "dead-letters-full"


class TableUnusable(TableError):
    """The table's folder or format cannot be used."""

    code = "table-unusable"


class FormChanged(TableError):
    """The table was made in another form than the settings ask for now."""

    code = "form-changed"


class TableAhead(TableError):
    """The table has applied more than the log holds: one of the two was restored from a copy."""

    code = "table-ahead"


class TableUnpublished(TableError):
    """The source does not publish the table's changes, so it must not be loaded."""

    code = "table-unpublished"
    remedy = Remedy.RETRY


class TableFailed(TableError):
    """A failure that nobody foresaw; it is tried again, and the others go on."""

    code = "unexpected"
    remedy = Remedy.RETRY


def _tree(root: type[TailraceError]) -> dict[str, type[TailraceError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


def error_class(code: str) -> type[TailraceError]:
    """The class a code stands for; the root for one that this version does not know."""
    return _tree(TailraceError).get(code, TailraceError)
