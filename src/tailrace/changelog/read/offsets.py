"""Places in the log: where a commit's number, a position of the source or a time is.

A place lies between two transactions. A commit may hold many, so a position or a time can lie inside of one; then the
place names the last row before it. Numbers are taken as *from this commit on* and *up to and with it*; a position as
*what ended after it* and *up to and with it*; a time as *from the first transaction committed then or later* and *up
to the first one committed later*. So what ends at a position goes on there, with nothing between and nothing twice.

A start from before all that the log has is refused, be it that the log began later or that what it had is gone: nobody
could see that what comes is a part. `earliest` is the way to ask for what there is. So is a start from after all that
the log was read up to: what comes next may lie before it.
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
"""What whoever asks for a place calls it."""
OffsetOption = str | int | Lsn | datetime
"""`earliest`, `latest`, a commit's number, a position or a time."""
OFFSET_EXAMPLES = (
    "It is `earliest`, `latest`, a commit's number (42), a position (16/B374D848) or a time (2026-11-16T12:00:00Z)."
)


@dataclass(frozen=True, order=True)
class LogOffset:
    """After the commit, and after the row with this `_seq` where that lies in the next one."""

    commit: int
    seq: int = 0


def parse_offset_option(text: str) -> OffsetOption | None:
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


def starting_offset(log: ChangeLog, point: OffsetOption, tables: frozenset[int]) -> LogOffset:
    """After this place begins what was asked for."""
    newest = log.newest()
    match point:
        case int():
            if not FIRST_COMMIT <= point <= newest + 1:
                raise _outside(log, point, newest, START_OPTION)
            return LogOffset(point - 1)
        case datetime():
            place, has_earlier = _before(log, _microseconds(point), tables)
            if not has_earlier and point < (begin := _begun_at(log)):
                raise _too_early(log, point, begin)
            if place == LogOffset(newest):
                _refuse_unread(log, point, START_OPTION)
            return place
        case Lsn():
            _refuse_unread(log, point, START_OPTION)
            if point < (first := _begun_after(log)):
                raise _too_early(log, point, first)
            return _after(log, point, tables)
        case _:
            return LogOffset(newest) if point == LATEST else _earliest(log, tables)


def refuse_past_start(point: OffsetOption) -> None:
    """Refuse a start in the past of a log that is yet to be made: it will have none."""
    if point in (EARLIEST, LATEST) or (isinstance(point, int) and FIRST_COMMIT <= point <= FIRST_COMMIT + 1):
        return
    raise ConfigError(
        "the log is new, and begins with what is committed from now on",
        asked=point.isoformat() if isinstance(point, datetime) else point,
        hint="Leave out `startingPosition`. What is there already is had by reading the table as a whole: "
        '`spark.read.format("cdc")` with `url`.',
    )


def ending_offset(log: ChangeLog, point: OffsetOption, tables: frozenset[int]) -> LogOffset:
    """At this place ends what was asked for."""
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
    """Before the oldest row of which, and after which, nothing of the tables is gone."""
    gone = log.trimmed()
    return LogOffset(
        gone.commit, max((table.last_seq for table in log.trimmed_tables(gone, tables).values()), default=0)
    )


def _after(log: ChangeLog, position: Lsn, tables: frozenset[int]) -> LogOffset:
    """After the last transaction that ended at the position or before."""
    commit = log.commit_at(position)

    def later(rows: pa.RecordBatch) -> pa.Array:
        texts = rows.column(change.POSITION)
        found = [text for text in pc.unique(texts).to_pylist() if Lsn.parse(text) > position]
        return pc.is_in(texts, pa.array(found, pa.string()))

    trimmed = position < log.trimmed().position
    return LogOffset(commit) if trimmed or commit == log.newest() else _inside(log, commit + 1, tables, later)


def _before(log: ChangeLog, at: int, tables: frozenset[int]) -> tuple[LogOffset, bool]:
    """Before the first transaction that was committed at this time or later; at the end if there is none. And whether
    the log has one from before it, or of that very time: then nothing that came later is missing."""

    def later(rows: pa.RecordBatch) -> pa.Array:
        return pc.greater_equal(rows.column(change.COMMITTED_AT).cast(pa.int64()), at)

    newest, has_earlier = log.newest(), False
    for block in commit_blocks(log, log.trimmed().commit + 1, newest):
        found = (block.committed_at >= at).nonzero()[0]
        has_earlier |= bool((block.committed_at[: found[0] if len(found) else None] >= 0).any())
        if len(found):
            commit = int(block.commit[found[0]])
            has_earlier = has_earlier or _first_time(log, commit) <= at
            return _inside(log, commit, tables, later), has_earlier
    return LogOffset(newest), has_earlier


def _inside(
    log: ChangeLog, commit: int, tables: frozenset[int], later: Callable[[pa.RecordBatch], pa.Array]
) -> LogOffset:
    """Before the first row of a commit that is later; rows of a transaction lie together, and none is before it.

    Of the tables that are asked for: whoever lacks rows of another is not concerned.
    """
    first = least = SEQ_MAX
    most = 0
    for batch in log.read(commit, commit, tables=_whole(log, commit, tables)):
        seqs, is_later = batch.data.column(change.SEQ), later(batch.data)
        after, earlier = seqs.filter(is_later), seqs.filter(pc.invert(is_later))
        first = min(first, after[0].as_py() if len(after) else SEQ_MAX)
        if len(earlier):
            least, most = min(least, earlier[0].as_py()), max(most, earlier[-1].as_py())
    if first == SEQ_MAX and most:
        return LogOffset(commit)
    # What was committed earlier may come later, also in another table.
    return LogOffset(commit - 1, min(most, first - 1) if least < first else 0)


def _whole(log: ChangeLog, commit: int, tables: frozenset[int] | None = None) -> frozenset[int]:
    """Those of the tables, or of all, of which nothing is gone from a commit on. Reading others would be refused."""
    gone = log.trimmed()
    if tables is None:
        log.schemas.load()
        tables = log.schemas.numbers_matching(lambda _: True)
    return tables - {number for number, table in log.trimmed_tables(gone, tables).items() if table.commit >= commit}


def _first_time(log: ChangeLog, commit: int) -> int:
    """When the first transaction of a commit was committed at the source, as far as its rows are kept."""
    times = [
        pc.min(batch.data.column(change.COMMITTED_AT)).value
        for batch in log.read(commit, commit, tables=_whole(log, commit))
    ]
    return min(times, default=SEQ_MAX)


def _begun_at(log: ChangeLog) -> datetime:
    """What lies before the oldest commit was committed at the source before that was written."""
    first = log.trimmed().commit + 1
    if log.newest() < first:
        return datetime.now(UTC)
    return _time(log_start_at(log, first).written_at)


def _begun_after(log: ChangeLog) -> Lsn:
    """The position that all transactions after it are in the log; 0/0 if that is not known."""
    gone = log.trimmed()
    return gone.position if gone.commit else log_start_at(log, FIRST_COMMIT).position


def _time(microseconds: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=microseconds)


def _microseconds(time: datetime) -> int:
    since = time - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds


def _refuse_unread(log: ChangeLog, point: Lsn | datetime, option: str) -> None:
    last = log.last_header()
    name, asked, reaches = "position", str(point), "nothing"
    if isinstance(point, Lsn):
        unread = last is None or point > last.end
        reaches = str(last.end) if last else reaches
    else:
        # A quiet source has only commits without a transaction: when they were written is how far it was read.
        until = _time(max(last.written_at, last.committed_at or 0)) if last else None
        unread = until is None or point > until
        name, asked, reaches = "time", point.isoformat(), until.isoformat() if until else reaches
    if unread:
        raise ConfigError(
            f"the log has not been read up to this {name}",
            **{name: asked},
            reaches=reaches,
            hint=f"Is the capture running? Wait until the log has it, or give `{option}` an earlier one; `latest` "
            + ("begins with what comes next." if option == START_OPTION else "ends with what there is."),
        )


def _too_early(log: ChangeLog, point: Lsn | datetime, begin: Lsn | datetime) -> TailraceError:
    asked, first = (value.isoformat() if isinstance(value, datetime) else value for value in (point, begin))
    hint = (
        f"`startingPosition` `earliest` gives all that it has; {first}, or later, is possible too. What was there "
        'before is had by reading the table as a whole: `spark.read.format("cdc")` with `url`.'
    )
    if log.trimmed().commit:
        return LogTrimmed("the log no longer holds what it held then", asked=asked, begins=first, hint=hint)
    return ConfigError("the log begins later than that", asked=asked, begins=first, hint=hint)


def _outside(log: ChangeLog, commit: int, newest: int, option: str) -> ConfigError:
    return ConfigError(
        "the log has no commit of this number",
        commit=commit,
        first=log.trimmed().commit + 1,
        last=newest,
        hint=f"Give `{option}` one that it has, or `earliest`, `latest`, a position (16/B374D848) or a time "
        "(2026-11-16T12:00:00Z).",
    )
