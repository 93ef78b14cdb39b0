"""Places in the log: where a commit's number, a position of the source or a time is.

A place lies between two transactions. A commit may hold many, so a position or a time can lie inside of one; then the
place names the last row before it. Numbers are taken as *from this commit on* and *up to and with it*; a position as
*what ended after it* and *up to and with it*; a time as *from the first transaction committed then or later* and *up
to the first one committed later*. So what ends at a position goes on there, with nothing between and nothing twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.compute as pc

from tailrace.changelog.commits import blocks
from tailrace.changelog.reader import FIRST_COMMIT, ChangeLog
from tailrace.errors import ConfigError
from tailrace.model import change
from tailrace.model.position import Lsn

EARLIEST, LATEST = "earliest", "latest"
Point = str | int | Lsn | datetime
"""`earliest`, `latest`, a commit's number, a position or a time."""
EXAMPLES = (
    "It is `earliest`, `latest`, a commit's number (42), a position (16/B374D848) or a time (2026-11-16T12:00:00Z)."
)


@dataclass(frozen=True, order=True)
class Place:
    """After the commit, and after the row with this `_seq` where that lies in the next one."""

    commit: int
    seq: int = 0


def parse_point(text: str) -> Point | None:
    """What is written; None if it is nothing of the kind. A time without a zone is UTC."""
    given = text.strip()
    if given.lower() in (EARLIEST, LATEST):
        return given.lower()
    if re.fullmatch(r"[0-9]{1,18}", given):
        return int(given)
    if "/" in given:
        try:
            return Lsn.parse(given)
        except ConfigError:
            return None
    try:
        found = datetime.fromisoformat(given)
    except ValueError:
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def starting_place(log: ChangeLog, point: Point, tables: frozenset[int]) -> Place:
    """After this place begins what was asked for."""
    newest = log.newest()
    match point:
        case int():
            if not FIRST_COMMIT <= point <= newest + 1:
                raise _outside(log, point, newest)
            return Place(point - 1)
        case datetime():
            return _before(log, _microseconds(point))
        case Lsn():
            _refuse_unread(log, point)
            return _after(log, point)
        case _:
            return Place(newest) if point == LATEST else _earliest(log, tables)


def ending_place(log: ChangeLog, point: Point, tables: frozenset[int]) -> Place:
    """At this place ends what was asked for."""
    newest = log.newest()
    match point:
        case int():
            if not FIRST_COMMIT <= point <= newest:
                raise _outside(log, point, newest)
            return Place(point)
        case datetime():
            return _before(log, _microseconds(point) + 1)
        case Lsn():
            _refuse_unread(log, point)
            return _after(log, point)
        case _:
            return Place(newest) if point == LATEST else _earliest(log, tables)


def _earliest(log: ChangeLog, tables: frozenset[int]) -> Place:
    """Before the oldest row of which, and after which, nothing of the tables is gone."""
    gone = log.trimmed()
    return Place(gone.commit, max((table.last_seq for table in log.lost(gone, tables).values()), default=0))


def _after(log: ChangeLog, position: Lsn) -> Place:
    """After the last transaction that ended at the position or before."""
    commit = log.commit_at(position)

    def later(rows: pa.RecordBatch) -> pa.Array:
        texts = rows.column(change.POSITION)
        found = [text for text in pc.unique(texts).to_pylist() if Lsn.parse(text) > position]
        return pc.is_in(texts, pa.array(found, pa.string()))

    trimmed = position < log.trimmed().position
    return Place(commit) if trimmed or commit == log.newest() else _inside(log, commit + 1, later)


def _before(log: ChangeLog, at: int) -> Place:
    """Before the first transaction that was committed at this time or later; at the end if there is none."""

    def later(rows: pa.RecordBatch) -> pa.Array:
        return pc.greater_equal(rows.column(change.COMMITTED_AT).cast(pa.int64()), at)

    newest = log.newest()
    for block in blocks(log, log.trimmed().commit + 1, newest):
        found = (block.committed_at >= at).nonzero()[0]
        if len(found):
            return _inside(log, int(block.commit[found[0]]), later)
    return Place(newest)


def _inside(log: ChangeLog, commit: int, later: Callable[[pa.RecordBatch], pa.Array]) -> Place:
    """Before the first row of a commit that is later; rows of a transaction lie together, and none is before it."""
    begin = first = 0
    for batch in log.read(commit, commit):
        seqs = batch.data.column(change.SEQ)
        after = seqs.filter(later(batch.data))
        begin = min(begin or seqs[0].as_py(), seqs[0].as_py())
        if len(after):
            first = min(first or after[0].as_py(), after[0].as_py())
    if begin and not first:
        return Place(commit)
    return Place(commit - 1, first - 1 if first > begin else 0)


def _microseconds(time: datetime) -> int:
    since = time - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds


def _refuse_unread(log: ChangeLog, position: Lsn) -> None:
    last = log.last_header()
    if last is None or position > last.end:
        raise ConfigError(
            "the log has not been read up to this position", position=position, reaches=last.end if last else "nothing",
            hint="Is the capture running? Wait until the log has it, or give an earlier one.",
        )  # fmt: skip


def _outside(log: ChangeLog, commit: int, newest: int) -> ConfigError:
    return ConfigError(
        "the log has no commit of this number", commit=commit, first=log.trimmed().commit + 1, last=newest,
        hint=EXAMPLES,
    )  # fmt: skip
