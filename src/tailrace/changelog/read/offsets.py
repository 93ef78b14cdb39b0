"""Resolve offsets in the log, given by commit number, source position or time.

An offset is between two transactions. A commit may hold many, so a position or a time can be inside one. The offset
then names the last row before it.

- A start at a number means *from this commit on*; an end means *up to and including it*.
- A start at a position means *what ended after it*; an end means *what ended up to and including it*.
- A start at a time means *from the first transaction committed then or later*; an end means *up to the first one
  committed later*.

So a reader that ends at a position and one that starts there share no row and miss none.

A start before all that the log has is refused, whether the log began later or has trimmed it: no reader could see that
it gets only a part. `earliest` asks for what there is. A start after all that the log has read is refused too: what is
captured next may be before it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pyarrow.compute as pc

from tailrace.changelog.read.commit_lookup import commit_blocks, log_start_at
from tailrace.changelog.read.reader import FIRST_COMMIT, SEQ_MAX, ChangeLog
from tailrace.errors import ConfigError, LogTrimmed, TailraceError
from tailrace.model import change
from tailrace.model.position import Lsn

EARLIEST, LATEST = "earliest", "latest"
START_OPTION, END_OPTION = "startingPosition", "endingPosition"
"""The options that take an offset."""
OffsetOption = str | int | Lsn | datetime
"""`earliest`, `latest`, a commit's number, a position or a time."""
OFFSET_EXAMPLES = (
    "It is `earliest`, `latest`, a commit's number (42), a position (16/B374D848) or a time (2026-11-16T12:00:00Z)."
)


@dataclass(frozen=True, order=True)
class LogOffset:
    """An offset in the log: a commit, and a row in the next one.

    It is after the commit, and after the row with this `_seq` if that is in the next commit.
    """

    commit: int
    seq: int = 0


def parse_offset_option(text: str) -> OffsetOption | None:
    """Return the offset that a text means, or None. A time without a zone is UTC."""
    stripped = text.strip()
    if stripped.lower() in (EARLIEST, LATEST):
        return stripped.lower()
    if re.fullmatch(r"[0-9]{1,18}", stripped):
        return int(stripped)
    if "/" in stripped:
        try:
            return Lsn.parse(stripped)
        except ConfigError:
            return None
    try:
        time = datetime.fromisoformat(stripped)
    except ValueError:
        return None
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


def starting_offset(log: ChangeLog, point: OffsetOption, tables: frozenset[int]) -> LogOffset:
    """Return the offset after which the requested changes begin."""
    newest = log.newest()
    match point:
        case int():
            if not FIRST_COMMIT <= point <= newest + 1:
                raise _outside(log, point, newest, START_OPTION)
            return LogOffset(point - 1)
        case datetime():
            offset, has_earlier = _before(log, _microseconds(point), tables)
            if not has_earlier and point < (begin := _log_start_time(log)):
                raise _too_early(log, point, begin)
            if offset == LogOffset(newest):
                _refuse_unread(log, point, START_OPTION)
            return offset
        case Lsn():
            _refuse_unread(log, point, START_OPTION)
            if point < (first := _log_start_position(log)):
                raise _too_early(log, point, first)
            return _after(log, point, tables)
        case _:
            return LogOffset(newest) if point == LATEST else _earliest(log, tables)


def refuse_past_start(point: OffsetOption) -> None:
    """Refuse a start in the past for a log that does not exist yet.

    A new log has no past.
    """
    if point in (EARLIEST, LATEST) or (isinstance(point, int) and FIRST_COMMIT <= point <= FIRST_COMMIT + 1):
        return
    raise ConfigError(
        "the log is new and begins with what is committed from now on",
        asked=point.isoformat() if isinstance(point, datetime) else point,
        hint="Leave out `startingPosition`. To get the rows that exist already, read the table as a whole: "
        '`spark.read.format("cdc")` with `url`.',
    )


def ending_offset(log: ChangeLog, point: OffsetOption, tables: frozenset[int]) -> LogOffset:
    """Return the offset at which the requested changes end."""
    newest = log.newest()
    match point:
        case int():
            if not FIRST_COMMIT <= point <= newest:
                raise _outside(log, point, newest, END_OPTION)
            return LogOffset(point)
        case datetime():
            return _before(log, _microseconds(point) + 1, tables)[0]
        case Lsn():
            _refuse_unread(log, point, END_OPTION)
            return _after(log, point, tables)
        case _:
            return LogOffset(newest) if point == LATEST else _earliest(log, tables)


def _earliest(log: ChangeLog, tables: frozenset[int]) -> LogOffset:
    """Return the offset before the oldest row after which nothing of the tables is trimmed."""
    trimmed = log.trimmed()
    return LogOffset(
        trimmed.commit, max((table.last_seq for table in log.trimmed_tables(trimmed, tables).values()), default=0)
    )


def _after(log: ChangeLog, position: Lsn, tables: frozenset[int]) -> LogOffset:
    """Return the offset after the last transaction that ended at or before the position."""
    commit = log.commit_at(position)

    def later(rows: pa.RecordBatch) -> pa.Array:
        texts = rows.column(change.POSITION)
        later_texts = [text for text in pc.unique(texts).to_pylist() if Lsn.parse(text) > position]
        return pc.is_in(texts, pa.array(later_texts, pa.string()))

    trimmed = position < log.trimmed().position
    return LogOffset(commit) if trimmed or commit == log.newest() else _inside(log, commit + 1, tables, later)


def _before(log: ChangeLog, at: int, tables: frozenset[int]) -> tuple[LogOffset, bool]:
    """Return the offset before the first transaction committed at this time or later.

    Without such a transaction that is the end of the log. Also return true if the log has a transaction from before
    that time, or of exactly that time: then nothing later is missing.
    """

    def later(rows: pa.RecordBatch) -> pa.Array:
        return pc.greater_equal(rows.column(change.COMMITTED_AT).cast(pa.int64()), at)

    newest, has_earlier = log.newest(), False
    for block in commit_blocks(log, log.trimmed().commit + 1, newest):
        indexes = (block.committed_at >= at).nonzero()[0]
        has_earlier |= bool((block.committed_at[: indexes[0] if len(indexes) else None] >= 0).any())
        if len(indexes):
            commit = int(block.commit[indexes[0]])
            has_earlier = has_earlier or _first_time(log, commit) <= at
            return _inside(log, commit, tables, later), has_earlier
    return LogOffset(newest), has_earlier


def _inside(
    log: ChangeLog, commit: int, tables: frozenset[int], is_later: Callable[[pa.RecordBatch], pa.Array]
) -> LogOffset:
    """Return the offset before the first row of a commit for which `is_later` holds.

    A transaction's rows are together, so no row of a later one is before it. Only rows of the requested tables count:
    rows of others that are trimmed do not matter.
    """
    first = first_earlier = SEQ_MAX
    last_earlier = 0
    for batch in log.read(commit, commit, tables=_untrimmed_tables(log, commit, tables)):
        seqs, is_later_row = batch.data.column(change.SEQ), is_later(batch.data)
        after, earlier = seqs.filter(is_later_row), seqs.filter(pc.invert(is_later_row))
        first = min(first, after[0].as_py() if len(after) else SEQ_MAX)
        if len(earlier):
            first_earlier, last_earlier = min(first_earlier, earlier[0].as_py()), max(last_earlier, earlier[-1].as_py())
    if first == SEQ_MAX and last_earlier:
        return LogOffset(commit)
    # A transaction that was committed earlier may follow in the log, also in another table.
    return LogOffset(commit - 1, min(last_earlier, first - 1) if first_earlier < first else 0)


def _untrimmed_tables(log: ChangeLog, commit: int, tables: frozenset[int] | None = None) -> frozenset[int]:
    """Return the tables, of these or of all, with all rows from a commit on.

    To read others would be refused.
    """
    trimmed = log.trimmed()
    if tables is None:
        log.schemas.load()
        tables = log.schemas.numbers_matching(lambda _: True)
    return tables - {number for number, table in log.trimmed_tables(trimmed, tables).items() if table.commit >= commit}


def _first_time(log: ChangeLog, commit: int) -> int:
    """Return when the first transaction of a commit was committed at the source.

    Only kept rows count.
    """
    times = [
        pc.min(batch.data.column(change.COMMITTED_AT)).value
        for batch in log.read(commit, commit, tables=_untrimmed_tables(log, commit))
    ]
    return min(times, default=SEQ_MAX)


def _log_start_time(log: ChangeLog) -> datetime:
    """Return the time when the oldest commit was written.

    What is before that commit was committed at the source earlier.
    """
    first = log.trimmed().commit + 1
    if log.newest() < first:
        return datetime.now(UTC)
    return _time(log_start_at(log, first).written_at)


def _log_start_position(log: ChangeLog) -> Lsn:
    """Return the position after which all transactions are in the log; 0/0 if unknown."""
    trimmed = log.trimmed()
    return trimmed.position if trimmed.commit else log_start_at(log, FIRST_COMMIT).position


def _time(microseconds: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=microseconds)


def _microseconds(time: datetime) -> int:
    since = time - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds


def _refuse_unread(log: ChangeLog, point: Lsn | datetime, option: str) -> None:
    last = log.last_header()
    name, requested, reaches = "position", str(point), "nothing"
    if isinstance(point, Lsn):
        unread = last is None or point > last.end
        reaches = str(last.end) if last else reaches
    else:
        # A quiet source has only commits without a transaction: their own time says how far it was read.
        until = _time(max(last.written_at, last.committed_at or 0)) if last else None
        unread = until is None or point > until
        name, requested, reaches = "time", point.isoformat(), until.isoformat() if until else reaches
    if unread:
        raise ConfigError(
            f"the log has not been read up to this {name}",
            **{name: requested},
            reaches=reaches,
            hint=f"Check that the capture is running. Wait until the log has it, or give `{option}` an earlier one; "
            + ("`latest` begins with the next change." if option == START_OPTION else "`latest` ends with the last."),
        )


def _too_early(log: ChangeLog, point: Lsn | datetime, begin: Lsn | datetime) -> TailraceError:
    requested, first = (value.isoformat() if isinstance(value, datetime) else value for value in (point, begin))
    hint = (
        f"Set `startingPosition` to `earliest` for all that the log has, or to {first} or later. To get what was there "
        'before, read the table as a whole: `spark.read.format("cdc")` with `url`.'
    )
    if log.trimmed().commit:
        return LogTrimmed("the log no longer holds changes from that time", asked=requested, begins=first, hint=hint)
    return ConfigError("the log begins later than the requested start", asked=requested, begins=first, hint=hint)


def _outside(log: ChangeLog, commit: int, newest: int, option: str) -> ConfigError:
    return ConfigError(
        "the log has no commit of this number",
        commit=commit,
        first=log.trimmed().commit + 1,
        last=newest,
        hint=f"Give `{option}` one that it has, or `earliest`, `latest`, a position (16/B374D848) or a time "
        "(2026-11-16T12:00:00Z).",
    )
