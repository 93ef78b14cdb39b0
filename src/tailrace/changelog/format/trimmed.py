"""What the log no longer holds, so that whoever comes too late is told instead of served a part.

Rows go per table: `last_seq` is the last row of a table that was let go, and whoever has covered that row lacks
nothing. The record is written before anything is removed: after a crash in between, more is kept than it says.
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
    """What of one table is gone."""

    last_seq: int
    commit: int
    """The commit that row was in."""
    rows: int
    bytes: int
    why: str = "retention"
    """`retention`, or `detached`: taken from a table or consumer that held too much."""


@dataclass(frozen=True, kw_only=True)
class TrimRecord:
    """What is gone of the whole log."""

    commit: int = 0
    """Every commit up to this one is gone altogether."""
    position: Lsn = ZERO
    next_seq: int = 1
    transactions: int = 0
    rows: int = 0
    tables: dict[int, TrimmedTable] = field(default_factory=dict)

    def trimmed_after(self, table: int, seq: int) -> TrimmedTable | None:
        """What is gone of the table after a row; None if nothing is."""
        gone = self.tables.get(table)
        return gone if gone is not None and gone.last_seq > seq else None

    def is_trimmed(self, table: int, last_seq: int) -> bool:
        """Whether rows of a table up to this one are gone."""
        gone = self.tables.get(table)
        return gone is not None and last_seq <= gone.last_seq


NOTHING_TRIMMED = TrimRecord()


def read_trimmed(log: LogPath) -> TrimRecord:
    """The record; a log without one has lost nothing."""
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
    """Make the record durable, in place of the one that was stamped so before; only then may files go."""
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
