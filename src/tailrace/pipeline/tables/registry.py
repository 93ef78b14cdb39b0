"""Each table's life, as far as the log and the table itself tell it; no Spark in here.

A table's own commit says what it has; `TableLife` keeps only a copy of that. A table that holds no position of
this log is new, and nothing else decides that. The file is longer than most because what a table may do next hangs on
all that is known of it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

from tailrace.capture.postgres.catalogue import SourceTable
from tailrace.changelog.format.coverage import Published
from tailrace.changelog.format.gaps import Gap
from tailrace.changelog.read.index import LogIndex, Slice
from tailrace.changelog.read.reader import ChangeLog
from tailrace.changelog.read.row_steps import after_position
from tailrace.errors import LogTrimmed, Remedy, SchemaChanged, TailraceError
from tailrace.model.evolution import is_news
from tailrace.model.policies import POLICIES, Policies
from tailrace.model.position import Lsn
from tailrace.model.schema import Identity, TableId, TableSchema
from tailrace.pipeline.report import LoadDone, LoadStatus, TableState
from tailrace.pipeline.tables.resume_checks import refuse_ahead, refuse_lost_identity, saw_too_little, stops_at_another
from tailrace.tables.evolve.schema_plan import Recast, Refresh, Step, ValueOf, no_value, plan
from tailrace.tables.location import Layout, Place
from tailrace.tables.port import Cursor
from tailrace.tables.position_errors import not_loaded, put_back
from tailrace.tables.schema_errors import RELOAD_HINT
from tailrace.tables.table_paths import anothers
from tailrace.tasks.load_store import Seed, Seeds

log = logging.getLogger(__name__)

ROWS_PER_BATCH_MAX = 500_000
"""Of all tables in one micro-batch, unless a single commit has more."""
ROWS_PER_APPLY_MAX = 500_000
"""Of one table in one commit, unless a single commit of the log has more."""
TRIMMED_HINT = (
    "Run `tailrace snapshot FILE TABLE`: the table is loaded anew. `log.retention` and `log.max_bytes` say "
    "for how long the log waits for a table."
)
NOT_PUBLISHED = "its changes were not published for a while"
RECALL_SECONDS = 5.0
RETRIES_MAX = 7
"""Of a table whose failure may pass by itself, before it counts as failed."""
DOUBT_SECONDS = 30.0
"""After a job of Spark's has broken off, until none of its tasks can be at work any more: Spark ends them, and does not
wait for that."""


@dataclass
class TableLife:
    """One table: where it stands, and why it stands still if it does."""

    table: TableId
    place: Place
    state: TableState = TableState.NEW
    cursor: Cursor | None = None
    loading: Cursor | None = None
    """Where the load that is under way will stand at the earliest; what the log has after it must be kept."""
    load: LoadStatus | None = None
    """How that load stands."""
    last_load: LoadDone | None = None
    loaded_at: int | None = None
    """The source's time when all of that had been read, in µs since 1970; None: not known."""
    replay: str | None = None
    """The load whose chunks the log has not passed yet: until then rows may be newer than the position says."""
    healing: bool = False
    """Whether a row was read again that changes build on, and the log has not passed that yet: the same holds then."""
    halted: bool = False
    """Whether it goes no further, because a load is under way that must find it where its own snapshot is."""
    gone: bool = False
    """Whether the source does not have it any more, and it was never loaded."""
    once: bool = False
    """Whether its changes are not applied: it is loaded, and that is all."""
    rereads: bool = False
    """Whether rows may be missing that changes build on, because none were ever loaded."""
    shape: TableSchema | None = None
    announced: Announced | None = None
    """What the catalogue showed last, until the table is that."""
    refresh: str | None = None
    """Why the table must be loaded anew although the log has all that it lacks."""
    error: TailraceError | None = None
    """What it fails at or waits for. Others look without the lock, and one that has failed always says why: so this is
    set before that state, and cleared after it."""
    failures: int = 0
    failed_at: float = 0.0
    """Of the monotonic clock."""
    not_before: float = 0.0
    """When what it waits for is tried again, by the same clock; 0: it waits for nothing."""
    rows_estimated: int | None = None
    rows_loaded: int = 0
    note: str | None = None
    trouble: str | None = None
    """Why a load of a table that goes on came to nothing, until one lands."""
    version: int | None = None
    """The lake table's own number of the version that has this cursor; None: it was not asked for yet."""
    identity: str | None = None
    """Which lake table that version is of; None as well."""
    doubted_until: float = 0.0
    """Until when a task may still commit that nobody hears of, because its job broke off, by the monotonic clock; from
    then on it is the table itself that says where it stands. 0: there is none."""
    untended: int = 0
    """Commits since its files were last looked after."""
    bytes_changed: int = 0
    bytes_written: int = 0
    """Since this process began: of changes applied, and of the files that this, new shapes and joining files took."""
    insert_only: bool = False
    """Whether only inserts and truncates of it are published, for want of a replica identity."""
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    """Held by whoever is applying to the table, or takes it out of those that go on."""

    @property
    def mixed(self) -> bool:
        """Whether rows may be newer than the position says."""
        return self.replay is not None or self.healing

    def see(self, source: SourceTable) -> None:
        """What the source says of it now."""
        self.note, self.insert_only = source.identity_note, source.identity is Identity.NONE

    def fail(self, error: TailraceError, *, told: bool = True) -> None:
        """Stop the table, unless the failure may pass by itself and has not come too often."""
        self.error = error
        self.failures += 1
        self.failed_at = time.monotonic()
        passing = error.remedy is Remedy.RETRY
        if not passing or self.failures > RETRIES_MAX:
            self.state = TableState.FAILED
            self.error = error  # whoever found it whole a moment ago may have cleared it
            if told:
                log.error("table failed", extra={"table": str(self.table), "code": error.code, "reason": error.message})
        elif told:
            log.warning("table tried again", extra={"table": str(self.table), "code": error.code})

    def fall_back(self, state: TableState, error: TailraceError | None) -> None:
        """Be what it was before a load that came to nothing; what it stood still for then it stands still for again."""
        if state.broken:
            self.error = error
        self.state = state

    def wait(self, error: TailraceError, seconds: float) -> None:
        """What it needs cannot be had now, however often that is; the table is left alone for a while."""
        if self.error is None or self.error.code != error.code:
            log.warning("table waits", extra={"table": str(self.table), "code": error.code, "reason": error.message})
        self.error, self.not_before = error, time.monotonic() + seconds

    def doubt(self) -> None:
        """A task was at work on the table, and how far it came is not known: its worker was killed, say."""
        self.doubted_until, self.version = time.monotonic() + DOUBT_SECONDS, None

    def needs_snapshot(self) -> None:
        """What it must be loaded anew for stands; a person decides when."""
        self.state = TableState.NEEDS_SNAPSHOT
        self.error = SchemaChanged(
            "the table must be loaded anew", table=self.table, why=self.refresh, hint=RELOAD_HINT
        )

    def moved(self, cursor: Cursor, shape: TableSchema, version: int | None = None) -> None:
        """The table's own commit now says this."""
        self.error, self.failures, self.refresh, self.not_before = None, 0, None, 0.0
        self.stands(cursor, shape, version)

    def stands(self, cursor: Cursor, shape: TableSchema, version: int | None = None) -> None:
        """Where the table is; whether it goes on from there is another matter."""
        self.cursor, self.version, self.doubted_until = cursor, version, 0.0
        if version is None:  # it may have been made anew
            self.identity = None
        if self.shape is None or not self.shape.same_as(shape):
            self.shape, self.announced = shape, None  # what was seen beside the shape of before says nothing now


@dataclass(frozen=True)
class Stretch:
    """Slices of the log that a table can take in one commit, and where that brings it; or a recast of the table, that
    comes before them."""

    slices: tuple[Slice, ...]
    cursor: Cursor
    recast: Recast | None = None
    upto: Lsn | None = None
    """Where it ends, if that is inside the last slice."""


@dataclass(frozen=True, kw_only=True)
class Announced:
    """A shape that the source's catalogue showed, and a position at or after whatever made it so."""

    shape: TableSchema
    horizon: Lsn
    instead_of: TableSchema
    """What the table was when the catalogue was asked; if that very one is no longer so, it must be asked again."""


@dataclass(frozen=True, kw_only=True)
class Ahead:
    """What one micro-batch is to do."""

    end: int
    """The commit that it ends on."""
    limited: bool
    """Whether the log has more already, which would be too much at once."""


class Lives:
    """The tables of a pipeline beside the log they are fed from."""

    def __init__(
        self,
        log_reader: ChangeLog,
        layout: Layout,
        policies_of: Callable[[TableId], Policies] = lambda _: POLICIES,
        value_of: ValueOf = no_value,
        *,
        until: Lsn | None = None,
        tells: bool = True,
    ) -> None:
        self.log = log_reader
        self._tells = tells
        """Whether what becomes of tables is logged; who only looks shows it himself."""
        self._until = until
        """What the source had discarded after this counts for nothing, since no table is to come there."""
        self._read_published: tuple[int, Published] | None = None
        """And up to which commit that is whole."""
        self.index = LogIndex(log_reader)
        self.seeds = Seeds(log_reader.path)
        self._recorded: tuple[float, list[Seed]] | None = None
        self._layout = layout
        self.policies_of, self.value_of = policies_of, value_of
        self._growing = threading.Lock()
        self.tables: dict[TableId, TableLife] = {}
        self.waiting_for: str | None = None
        """What loads that have not begun wait for, as far as that is known."""

    def grow(self) -> int:
        """Take in what the log has got; its newest commit."""
        with self._growing:
            self.index.grow()
            return self.index.commit

    def ahead(self, after: int) -> Ahead:
        """Take in what the log has got; the commit up to which one micro-batch goes."""
        with self._growing:
            self.index.grow()
            end = self.index.bounded(after, ROWS_PER_BATCH_MAX)
            return Ahead(end=end, limited=end < self.index.commit)

    def add(self, table: TableId, source: SourceTable | None = None, mode: str = "initial") -> TableLife:
        """Begin to follow a table from what its own commit says."""
        folder = self._layout.root / table.schema / table.name  # until it is known whether that can be one
        life = TableLife(table, Place(path=folder, log_id=self.log.log_id))
        life.once, life.rereads = mode == "initial_only", mode in ("schema_only", "never")
        if source is not None:
            life.rows_estimated = source.rows_estimated
            life.see(source)
        self._stand(life, source)
        self.tables[table] = life  # only now: others look at it as soon as it is here
        return life

    def again(self, life: TableLife, source: SourceTable) -> None:
        """Look anew where a failed table stands, as at a start."""
        with life.lock:
            life.see(source)
            life.state = TableState.NEW
            life.error, life.failures, life.refresh, life.announced, life.gone = None, 0, None, None, False
            life.not_before = 0.0
            self._stand(life, source)

    def _stand(self, life: TableLife, source: SourceTable | None) -> None:
        """What the table's own commit says, and whether it can go on from there."""
        table = life.table
        try:
            life.place = self._layout.place(table, self.log.log_id)
            lake_table = life.place.look()
            if (shape := lake_table.shape()) is not None and shape.table != table:
                raise anothers(life.place.path, shape.table, table)
            life.cursor, life.shape = lake_table.cursor(), shape
            self._recall(life)
            stops = source is not None and stops_at_another(life, source.oid, self.policies_of(table))
            refuse_lost_identity(life, source)  # first: it is published anew for its inserts, and loads by itself then
            if life.cursor is not None and (stops or not (self.misses(life) or saw_too_little(life, source))):
                over = life.once and life.replay is None
                life.state = TableState.LOADED if over else TableState.CATCHING_UP
                refuse_ahead(life, self.log)
        except TailraceError as error:
            life.fail(error, told=self._tells)

    def look_again(self, life: TableLife) -> None:
        """Go by what the table's own commit says, if nobody heard how far the last task came. Whoever calls holds the
        table's lock."""
        if not life.doubted_until or life.cursor is None:
            return
        until, before = life.doubted_until, life.cursor
        over = time.monotonic() >= until
        try:
            table = life.place.look()
            cursor, shape = table.cursor(), table.shape()
            if cursor is None or shape is None:
                raise not_loaded(life.place.path)
            if cursor.load == before.load and cursor.seq < before.seq:
                raise put_back(life.place.path, cursor, before)
        except TailraceError as error:
            life.fail(error)
            return
        if cursor != before and not life.state.broken:  # it was done after all
            life.error, life.failures = None, 0
        life.stands(cursor, shape)
        life.doubted_until = 0.0 if over else until
        if cursor.load != before.load:
            self.notice_reread(life)

    def _recall(self, life: TableLife) -> None:
        """What an earlier process left of a load."""
        for seed in self._unfinished():
            if seed.table != life.table:
                continue
            if life.cursor is not None and life.cursor.load == seed.id:
                life.replay, life.loading = seed.id, None  # older ones were before it
            else:
                life.loading = life.loading or self.cursor_at(seed.floor)
        self.notice_reread(life)

    def notice_reread(self, life: TableLife) -> None:
        """What is on record of rows that were read: the table may hold newer ones than its position says."""
        if life.cursor is None or life.cursor.load is None or life.once:
            return
        landed = self.seeds.landed(life.cursor.load)
        life.healing = landed is not None and landed.mixed_until(life.cursor.position) is not None
        life.loaded_at = landed.time if landed is not None else None
        if life.healing and life.state is TableState.LIVE:
            life.state = TableState.CATCHING_UP

    def _unfinished(self) -> list[Seed]:
        """The loads on record. Tables are added by the hundred, so they are looked up once for all of them."""
        if self._recorded is None or time.monotonic() > self._recorded[0] + RECALL_SECONDS:
            self._recorded = (time.monotonic(), self.seeds.all())
        return self._recorded[1]

    def cursor_at(self, position: Lsn) -> Cursor:
        """Where a table stands that has all that ended at or before the position.

        A commit that straddles the point is not covered by number; its rows are told by position.
        """
        commit = self.index.commit_at(position)
        return Cursor(seq=self.index.next_seq(commit) - 1, commit=commit, position=position)

    def _replayed(self, life: TableLife) -> bool:
        """Whether the log has passed the last chunk of the load that the table came from, and rows read again since."""
        if not life.mixed or life.cursor is None:
            return True
        position = self.index.position  # before we look what there is up to it
        reached = life.cursor.position if self.pending(life, self.index.commit) else position
        if life.replay is not None and (passed := self.seeds.passed(life.replay)) is not None:
            return reached >= passed
        # Whoever loads may have ended it since we saw it on record; what it landed with is remembered.
        passed = self.seeds.mixed_until(life.cursor.load or "", life.cursor.position)
        return passed is None or reached >= passed

    def pending(self, life: TableLife, to: int) -> list[Slice]:
        """What the log holds for the table up to a commit and the table has not covered."""
        if life.cursor is None:
            return []
        covered = self.index.commit_at(life.cursor.position)
        found = [
            item
            for number in self.numbers(life)
            for item in self.index.pending(number, life.cursor.seq, to)
            if item.last > covered
        ]
        return sorted(found, key=lambda item: item.last_seq)

    def numbers(self, life: TableLife) -> list[int]:
        """The log's numbers for the table: one, unless it was dropped and made again."""
        return self.log.schemas.called(life.table, life.shape.relation if life.shape else None)

    def numbers_of(self, shape: TableSchema) -> list[int]:
        """The same for a table of this shape."""
        return self.log.schemas.called(shape.table, shape.relation)

    def kept_from(self, shape: TableSchema, cursor: Cursor) -> Cursor:
        """The cursor; or the first after it that the log still holds everything of the table from."""
        gone = self.index.lacks_after(self.numbers_of(shape), cursor.seq, cursor.position)
        return cursor if gone is None else replace(self.cursor_at(self.index.end_of(gone.commit)), load=cursor.load)

    def shape_after(self, shape: TableSchema, cursor: Cursor) -> TableSchema:
        """The shape of the table's first rows that the log has after a cursor; if it has none, the given one."""
        pending = [
            item
            for number in self.numbers_of(shape)
            for item in self.index.pending(number, cursor.seq, self.index.commit)
        ]
        first = min(pending, key=lambda item: item.last_seq, default=None)
        return shape if first is None else self.log.schemas.get(first.table, first.schema).schema

    def stretch(self, life: TableLife, end: int) -> Stretch | None:
        """The next stretch the table can take; None when there is none, and then its state says why."""
        if life.state.broken or life.refresh is not None or life.cursor is None or life.shape is None:
            return None
        if self._refuse_trimmed(life) or self._notice_gap(life) or life.halted:
            return None
        if life.once and self._replayed(life):
            life.state, life.replay, life.healing = TableState.LOADED, None, False
            return None
        reached = self.index.position  # before we look what there is up to it
        pending = self.pending(life, self.index.commit)
        if pending and self._notice_coming(life, pending):
            return None
        if (step := self._seen_step(life, reached, pending)) is not None:
            return self._stepped(life, step)
        taken: list[Slice] = []
        fitting: set[tuple[int, int]] = set()
        rows = 0
        for item in pending:
            if item.first > end or (taken and rows + item.rows > ROWS_PER_APPLY_MAX):
                break
            if (item.table, item.schema) not in fitting and (step := self.step_before(life, item)) is not None:
                if taken:
                    break
                return self._stepped(life, step)
            if self.index.start_of(item.first) >= life.cursor.position:
                fitting.add((item.table, item.schema))
            taken.append(item)
            rows += item.rows
        if not taken:
            if life.state.going_on and self._replayed(life):
                life.state, life.replay, life.healing = TableState.LIVE, None, False
            return None
        return Stretch(tuple(taken), self.reached(life.cursor, taken, pending[len(taken) :], max(end, taken[-1].last)))

    def reached(self, cursor: Cursor, taken: list[Slice], left: list[Slice], last: int) -> Cursor:
        """Where a table stands that has taken slices up to a commit. One may hold several of a table; a cursor must not
        pass the ones left for later."""
        if left:
            last = min(last, left[0].first - 1)
        seq = max(self.index.next_seq(last) - 1, taken[-1].last_seq)
        return replace(cursor, seq=seq, commit=last, position=max(cursor.position, self.index.end_of(last)))

    def _seen_step(self, life: TableLife, reached: Lsn, pending: list[Slice]) -> Step | None:
        """What the table must become for what the catalogue showed; no row of before is left to come."""
        told = life.announced
        if told is None or life.shape is None:
            return None
        if told.instead_of is life.shape:
            if reached < told.horizon or any(self.index.start_of(item.first) < told.horizon for item in pending):
                return None
            if (step := self.planned(life, told.shape)) is not None:
                return step
        if life.announced is told:  # another may have been seen meanwhile
            life.announced = None
        return None

    def notice_trimmed(self) -> None:
        """See whether tables that stand still have lost rows meanwhile: then their failure is the lesser trouble."""
        for life in list(self.tables.values()):
            if life.state is TableState.FAILED:
                self._refuse_trimmed(life)

    def since(self, table: TableId) -> Lsn | None:
        """A position that nothing of the table is missing after; None: nothing is missing at all."""
        published = self.log.published().since(table)
        return max([*(gap.end for gap in self._gaps()), *([published] if published else [])], default=None)

    def misses(self, life: TableLife) -> bool:
        """Whether changes are missing after where the table stands. One that is loaded only once takes none then."""
        since = self.since(life.table) if not life.once or life.replay is not None else None
        return since is not None and life.cursor is not None and life.cursor.position < since

    def lacks_from(self, life: TableLife) -> Lsn | None:
        """What the log lacks after where the table stands begins after this position; None: it lacks nothing."""
        assert life.cursor is not None, "a table that was loaded"
        here = life.cursor.position
        begins = [gap.start for gap in self._gaps() if gap.end > here]
        came = [coming.since for coming in self.log.published().comings if coming.table == life.table]
        # When it went out is not known; it has no rows from there to just before it came back.
        begins += [Lsn(since.value - 1) for since in came if since > here]
        return min(begins, default=None)

    def needs_all(self, life: TableLife) -> bool:
        """Whether nothing but a load of the whole table will do."""
        owed = life.shape is not None and life.shape.owed
        return life.state is TableState.NEW or life.refresh is not None or owed or self.misses(life)

    def _gaps(self) -> list[Gap]:
        known = [gap for gap in self.log.gaps() if gap.commit <= self.index.commit]
        return known if self._until is None else [gap for gap in known if gap.start < self._until]

    def lacks(self, life: TableLife) -> bool:
        """Whether changes are missing after where the table stands."""
        return life.cursor is not None and any(gap.end > life.cursor.position for gap in self._gaps())

    def _notice_gap(self, life: TableLife) -> bool:
        """Whether the table must not go on, because changes are missing; then it is loaded anew."""
        if lacking := self.lacks(life):
            self.load_anew(life, "the source had discarded changes before they were read")
        return lacking

    def _notice_coming(self, life: TableLife, pending: list[Slice]) -> bool:
        """Whether the table must not take what came once it was published again; then it is loaded anew. Another one
        that was made under its name its shape tells of, and so does a lost identity, for which it stops."""
        assert life.cursor is not None, "a table that takes anything"
        assert life.shape is not None, "a table that takes anything"
        since = self._published().again(life.table)
        if since is None or life.cursor.position >= since or life.once:
            return False
        schemas = {self.log.schemas.get(item.table, item.schema).schema for item in pending}
        if life.shape.identity is not Identity.NONE and any(one.identity is Identity.NONE for one in schemas):
            return False
        self.load_anew(life, NOT_PUBLISHED)
        return True

    def _published(self) -> Published:
        """When tables came into the publication, as far as the index goes: it is written down before their rows."""
        commit = self.index.commit
        if self._read_published is None or self._read_published[0] < commit:
            self._read_published = (commit, self.log.published())
        return self._read_published[1]

    def _refuse_trimmed(self, life: TableLife) -> bool:
        """Whether the log no longer holds what the table lacks; then it says so, and takes nothing."""
        if life.cursor is None:
            return False
        gone = self.index.lacks_after(self.numbers(life), life.cursor.seq, life.cursor.position)
        if gone is None:
            return False
        life.error = LogTrimmed(
            "the log no longer holds what the table lacks",
            table=life.table,
            applied=life.cursor.commit,
            gone_to=gone.commit,
            why=gone.why,
            hint=TRIMMED_HINT,
        )
        life.state = TableState.NEEDS_SNAPSHOT
        if self._tells:
            log.error("table needs a snapshot", extra={"table": str(life.table), "code": life.error.code})
        return True

    def replays_what_is_to_come(self, life: TableLife) -> bool:
        """Whether the table has applied all that the log holds, and was read when the source had more."""
        waits = life.mixed and life.state is TableState.CATCHING_UP
        return waits and not self.pending(life, self.index.commit) and not self._replayed(life)

    def covered(self, commit: int, *, but: Collection[TableId] = ()) -> bool:
        """Whether every table that can go on has applied the log up to the commit; some may be left out."""
        return all(
            life.table in but
            or life.state.broken
            or life.state in (TableState.LOADED, TableState.PAUSED)
            or (life.state is TableState.LIVE and not self.pending(life, commit) and not self.lacks(life))
            for life in list(self.tables.values())
        )

    def step_before(self, life: TableLife, item: Slice) -> Step | None:
        """What the table must become before it can take the slice."""
        assert life.cursor is not None, "a table that takes anything"
        assert life.shape is not None, "a table that takes anything"
        shape = self.shape_of(life.shape, item)
        step = self.planned(life, shape) if is_news(life.shape, shape) else None
        if step is None or self.index.start_of(item.first) >= life.cursor.position:
            return step
        # The load's point lies inside: rows that it has seen may be of a shape of before.
        rows = self.log.read(
            item.first, item.last, tables=[item.table], after_seq=life.cursor.seq, to_seq=item.last_seq
        )
        return step if any(len(after_position(batch, life.cursor.position)) for batch in rows) else None

    def shape_of(self, mine: TableSchema, item: Slice) -> TableSchema:
        """The shape of a slice's rows; where another table has taken the name over since, that one's."""
        shape = self.log.schemas.get(item.table, item.schema).schema
        if (shape.table, shape.relation) == (mine.table, mine.relation):
            return shape
        named = [version.schema for version in self.log.schemas.after(0) if version.schema.table == mine.table]
        return named[-1] if named and named[-1].relation != mine.relation else shape

    def planned(self, life: TableLife, new: TableSchema) -> Step | None:
        """What the table must become to take rows of another shape."""
        assert life.shape is not None, "a table that takes anything"
        return plan(life.shape, new, self.policies_of(life.table), self.value_of, life.place.form)

    def _stepped(self, life: TableLife, step: Step) -> Stretch | None:
        """The stretch that is only a recast; or the table says why it goes no further."""
        assert life.cursor is not None, "a table that takes anything"
        if isinstance(step, Recast):
            return Stretch((), life.cursor, step)
        if isinstance(step, Refresh):
            self.load_anew(life, step.why)
        else:
            life.fail(step, told=self._tells)
        return None

    def load_anew(self, life: TableLife, why: str) -> None:
        """Nothing but a load brings the table what it lacks."""
        life.refresh, life.announced, life.state = why, None, TableState.REFRESHING
        if life.rereads:  # its mode says that it is not loaded by itself
            life.needs_snapshot()
        if self._tells:
            log.info("table must be loaded anew", extra={"table": str(life.table), "why": why})
