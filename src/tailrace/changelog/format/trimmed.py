"""Record what was trimmed from the log.

A late reader then gets an error instead of a part. Rows are trimmed per table: `last_seq` is a table's last trimmed
row, and a reader that has covered that row lacks nothing. The record is written before anything is removed. After a
crash in between, the log holds more than the record says.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tailrace.errors import NEW_LOG_HINT, LogCorrupt
from tailrace.model.position import ZERO, Lsn
from tailrace.storage import files, records
from tailrace.storage.files import FileStamp, LogPath

FORMAT = 1
TRIMMED_FILE = "trimmed.json"


@dataclass(frozen=True, kw_only=True)
class TrimmedTable:
    """The trimmed rows of one table."""

    last_seq: int
    commit: int
    """The commit of that row."""
    rows: int
    bytes: int
    why: str = "retention"
    """`retention`, or `detached`: taken from a table or consumer that held too much."""


@dataclass(frozen=True, kw_only=True)
class TrimRecord:
    """All that is trimmed from the log."""

    commit: int = 0
    """Every commit up to this one is trimmed as a whole."""
    position: Lsn = ZERO
    next_seq: int = 1
    transactions: int = 0
    rows: int = 0
    tables: dict[int, TrimmedTable] = field(default_factory=dict)

    def trimmed_after(self, table: int, seq: int) -> TrimmedTable | None:
        """Return what is trimmed of the table after a row; None if nothing is."""
        trimmed = self.tables.get(table)
        return trimmed if trimmed is not None and trimmed.last_seq > seq else None

    def is_trimmed(self, table: int, last_seq: int) -> bool:
        """Return true if rows of a table up to this one are trimmed."""
        trimmed = self.tables.get(table)
        return trimmed is not None and last_seq <= trimmed.last_seq


NOTHING_TRIMMED = TrimRecord()


def read_trimmed(log: LogPath) -> TrimRecord:
    """Return the record; a log without one has lost nothing."""
    path = log / TRIMMED_FILE
    try:
        with files.explain_errors_but_missing(path):
            text = path.read_bytes()
        stored = records.decode(text, FORMAT)
        return TrimRecord(
            commit=stored["commit"],
            position=Lsn.parse(stored["position"]),
            next_seq=stored["next_seq"],
            transactions=stored["transactions"],
            rows=stored["rows"],
            tables={int(number): TrimmedTable(**table) for number, table in stored["tables"].items()},
        )
    except FileNotFoundError:
        return NOTHING_TRIMMED
    except (ValueError, KeyError, TypeError) as error:
        raise LogCorrupt(
            f"the record of what was trimmed cannot be read: {error}",
            path=path,
            hint=f"Restore it from a copy of the log. Without one: {NEW_LOG_HINT}",
        ) from error


def write_trimmed(log: LogPath, trimmed: TrimRecord, before: FileStamp | None = None) -> None:
    """Make the record durable; it replaces the one with the stamp `before`.

    Only then may files be removed.
    """
    stored: dict[str, Any] = {
        "format": FORMAT,
        "commit": trimmed.commit,
        "position": str(trimmed.position),
        "next_seq": trimmed.next_seq,
        "transactions": trimmed.transactions,
        "rows": trimmed.rows,
        "tables": {str(number): vars(table) for number, table in sorted(trimmed.tables.items())},
    }
    with files.explain_errors(log / TRIMMED_FILE), files.refuse_second_writer(log / TRIMMED_FILE):
        files.compare_and_swap(log / TRIMMED_FILE, records.encode(stored), before)
