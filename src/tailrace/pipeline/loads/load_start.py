"""How a load begins: the table is found, known to be published, then cut, then a snapshot is made to compare with.

In that order. A table that is not published would miss what is written while it is read; one that is rewritten between
cut and snapshot is told by its files.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

from tailrace import failpoints
from tailrace.capture.postgres.catalogue import SourceTable
from tailrace.capture.postgres.chunks import Cut, Plan
from tailrace.capture.postgres.source import PostgresCapture
from tailrace.deadletters.store import Letters
from tailrace.errors import SourceTableMissing, TableFailed, TableUnpublished, TailraceError, Unsupported
from tailrace.model.evolution import same_version
from tailrace.model.position import ZERO
from tailrace.model.schema import TableId, TableSchema
from tailrace.pipeline.config.settings import LoadSettings
from tailrace.pipeline.loads.history_catch_up import carry_to
from tailrace.pipeline.loads.load_commit import Run, land
from tailrace.pipeline.loads.running_load import Load, Shared
from tailrace.pipeline.report import LoadStatus, TableState
from tailrace.pipeline.tables.registry import Lives, TableLife
from tailrace.pipeline.tables.retention_holds import Holding
from tailrace.tables.port import Cursor
from tailrace.tables.table_paths import anothers, meet
from tailrace.tasks.load_store import LoadMode, Seed, Wish

log = logging.getLogger(__name__)

PUBLISHED_SECONDS_MAX = 30.0
"""A table that has just been made is published by the capturing process; only after this is it missed."""

ALTERED_MAX = 20
"""Times that a table was altered between its plan and the point that its replay starts at."""

_GONE_HINT = "Was it dropped or renamed? If it is made again it is loaded; else check `source.tables`."

Waiting = list[tuple[TableLife, Wish | None]]
Planned = list[tuple[TableLife, Plan, Wish | None]]


class Beginning:
    """Begins loads, one lot after the other: it may have to wait for transactions that are open at the source."""

    def __init__(
        self,
        settings: LoadSettings,
        source: PostgresCapture,
        lives: Lives,
        holding: Holding,
        *,
        run: Run,
        begun: Callable[[Load], None],
        failed: Callable[[TableLife, TailraceError], None],
        stopping: threading.Event,
    ) -> None:
        self._run = run
        self._settings = settings
        self._source = source
        self._lives = lives
        self._holding = holding
        self._begun = begun
        self._failed = failed
        self._stopping = stopping
        self._known_since: dict[TableId, float] = {}
        self._altered: dict[TableId, int] = {}
        self._followed = 0
        """How many tables the log had when all that there are were last followed."""
        self.chunked: set[TableId] = set()
        """Tables that could not be read in one snapshot."""

    @property
    def behind(self) -> bool:
        """Whether the log has tables that only rows tell of, and that nobody may have looked at yet."""
        return self._source.makes_tables and self._followed < len(self._lives.log.schemas.latest())

    def look(self) -> None:
        """See which tables the source has now: new ones are followed, failed ones tried again if a person wants it."""
        wanted = self._lives.seeds.retries()  # first: whoever asks for it has mended the source before
        known = self._lives.log.schemas.latest() if self._source.makes_tables else []
        self._source.know(version.schema for version in known)
        try:
            there = {table.table: table for table in self._source.tables()}
        except TailraceError:
            return  # whoever needs the source says so
        self._follow(there)
        self._followed = len(known)  # only now: whoever hears that nothing is behind finds all of them
        self._retry(wanted, there)

    def _follow(self, there: dict[TableId, SourceTable]) -> None:
        """Tables may have been made, or renamed into what the settings name, since we last looked."""
        for life in list(self._lives.tables.values()):
            if life.table not in there and life.state is TableState.NEW:
                life.gone = True
                life.fail(SourceTableMissing("the table is not there", table=life.table, hint=_GONE_HINT))
            elif life.gone and life.table in there and life.state is TableState.FAILED:
                life.gone, life.state, life.error, life.failures = False, TableState.NEW, None, 0
        for table, source in there.items():
            if (known := self._lives.tables.get(table)) is not None:
                known.see(source)
            else:
                log.info("table found", extra={"table": str(table)})
                self._lives.add(table, source, self._settings.mode_of(table))

    def _retry(self, wanted: Iterable[TableId], there: dict[TableId, SourceTable]) -> None:
        for table in wanted:
            life = self._lives.tables.get(table)
            if life is not None and life.state is TableState.FAILED and table in there:
                log.info("table tried again", extra={"table": str(table)})
                self._lives.again(life, there[table])
            self._lives.seeds.retried(table)

    def begin(self, waiting: Waiting) -> None:
        """Begin a load of each; what cannot be begun has failed."""
        planned: Planned = []
        for life, wish in self._fed(waiting):
            if wish is not None and wish.where is not None and self._lives.needs_all(life):
                wish = replace(wish, where=None)  # a part would not do
            mode = self._settings.mode_of(life.table)
            if wish is None and life.cursor is None and mode in ("schema_only", "never"):
                self._make_empty(life, mode)
            elif life.place.form.keeps and life.cursor is None and not life.once:
                # What the log has of it may be gone at the source: that comes first, and then what is there.
                if wish is None:
                    self._lives.seeds.wish(Wish(table=life.table, mode=LoadMode.REFRESH))
                self._make_empty(life, "never")
            elif (plan := self._plan(life, wish)) is not None:
                planned.append((life, plan, wish))
        chunked = [item for item in planned if item[1].schema.key and self._wants_chunked(item[0])]
        exact = [item for item in planned if item not in chunked]
        for some, begin in ((exact, self._begin_exact), (chunked, self._begin_chunked)):
            if some:
                try:
                    begin(some)
                except TailraceError as error:
                    for life, _, _ in some:
                        self._failed(life, error)

    def _wants_chunked(self, life: TableLife) -> bool:
        if self._settings.way == "exact" or life.place.form.exact:
            return False
        return self._settings.way == "chunked" or self._settings.standby is not None or life.table in self.chunked

    def _plan(self, life: TableLife, wish: Wish | None) -> Plan | None:
        """Cut the table; before the snapshot is made, so that a rewrite in between is noticed."""
        cut = Cut.PLACE if self._settings.way == "exact" or life.place.form.exact else Cut.EITHER
        if self._wants_chunked(life):
            cut = Cut.KEY
        try:
            _refuse_meeting(life, self._lives)
            life.place.look().refuse_foreign(life.table)
            plan = self._source.plan(life.table, cut, self._settings.chunk)
            if not plan.schema.columns:
                self._refuse_unpublished(life.table)
            if wish is not None and not plan.schema.key and (wish.where or wish.mode is LoadMode.REFRESH):
                raise Unsupported(
                    "a table without a key can only be replaced as a whole",
                    table=life.table,
                    hint="Leave out --where and --mode refresh, or give the table a primary key.",
                )
            self._refuse_form(life, plan.schema, wish)
            return plan
        except TailraceError as error:
            self._failed(life, error)
            return None

    def _refuse_unpublished(self, table: TableId) -> None:
        """Refuse a table that has columns and publishes none: it was made anew since it was looked at."""
        now = self._source.describe([table], unpublished=True)
        if table in now and now[table].columns:
            raise _unpublished(table, self._source.settings.publication)

    def _refuse_form(self, life: TableLife, schema: TableSchema, wish: Wish | None) -> None:
        """Refuse what the table's form cannot be made of, and what would take away a past that it keeps."""
        form = life.place.form
        form.stored(schema)
        if wish is not None and wish.where is not None:
            form.refuse_part(life.table)
        elif form.retains:
            carry_to(self._lives, life, schema, asked=wish is not None)

    def _begin_exact(self, planned: Planned) -> None:
        self._show_waiting(planned, "exact")
        for life, _, _ in planned:
            if life.place.form.exact:
                with life.lock:  # what is under way ends before the snapshot's point
                    life.halted = life.cursor is not None
        snapshot = self._source.snapshot().__enter__()
        shared = Shared(snapshot, users=1)  # ourselves, until all have begun
        begun: list[Load] = []
        try:
            self._lives.grow()
            for life, plan, wish in self._as_planned(planned):
                seed = Seed(plan=plan, point=snapshot.point, wish=wish, form=life.place.form)
                self._record(life, seed)
                shared.join()
                begun.append(Load(life=life, seed=seed, todo=deque(plan.chunks), staged={}, shared=shared))
                self._begun(begun[-1])
        finally:
            shared.leave()
            if self._stopping.is_set():  # whoever lets go of snapshots may have done so before these had begun
                for load in begun:
                    load.leave_snapshot()
        self._holding.say(now=True)

    def _begin_chunked(self, planned: Planned) -> None:
        self._show_waiting(planned, "chunked")
        # What comes while we wait is after the floor, and the floor is not known yet: hold from where the log is.
        self._lives.grow()
        for life, _, _ in planned:
            life.loading = self._lives.cursor_at(self._lives.index.position)
        self._holding.say(now=True)
        noted = self._source.begin_chunks(self._stopping.is_set)
        if noted is None:  # told to stop
            return
        for life, plan, wish in self._as_planned(planned):
            seed = Seed(plan=plan, point=None, noted=noted, wish=wish, form=life.place.form)
            self._record(life, seed)
            self._begun(
                Load(life=life, seed=seed, todo=deque(plan.chunks), staged={}, shared=None, at_least=noted.upto)
            )

    def _as_planned(self, planned: Planned) -> Planned:
        """Those that were not altered until the point the replay starts at; what was written to the others since is not
        replayed, so they begin again."""
        now = self._source.describe(life.table for life, _, _ in planned)
        found: Planned = []
        for life, plan, wish in planned:
            if life.table in now and same_version(plan.schema, now[life.table]):
                self._altered.pop(life.table, None)
                found.append((life, plan, wish))
                continue
            life.loading, life.load, life.halted = None, None, False
            self._altered[life.table] = self._altered.get(life.table, 0) + 1
            log.info("load begins again: the table was altered", extra={"table": str(life.table)})
            if self._altered[life.table] >= ALTERED_MAX:
                del self._altered[life.table]
                self._failed(
                    life,
                    TableFailed(
                        "the table is altered again and again while its load begins",
                        table=life.table,
                        hint="Load it when nobody alters it or its partitions: `tailrace snapshot FILE TABLE`.",
                    ),
                )
        return found

    def _record(self, life: TableLife, seed: Seed) -> None:
        life.loading = self._lives.cursor_at(seed.floor)
        self._lives.seeds.begin(seed)
        failpoints.hit("load.planned")
        log.info(
            "load begun", extra={"table": str(life.table), "chunks": len(seed.plan.chunks), "cut": seed.plan.cut.value}
        )

    def _make_empty(self, life: TableLife, mode: str) -> None:
        """A table that is never loaded begins empty: now, or where the log begins."""
        try:
            _refuse_meeting(life, self._lives)
            plan = self._source.plan(life.table, Cut.PLACE, self._settings.chunk)
            self._lives.grow()
            since = self._lives.since(life.table)
            here = self._lives.cursor_at(max(self._lives.index.position, since or ZERO))
            begin = self._lives.cursor_at(since) if since is not None else Cursor(seq=0, commit=0, position=ZERO)
            cursor = begin if mode == "never" else here
            schema = plan.schema
            if life.place.form.keeps:
                cursor = self._lives.kept_from(schema, cursor)
                schema = self._lives.shape_after(schema, cursor)
            # By this name it is on record where rows of it were read that changes build on.
            cursor = replace(cursor, load=(load := uuid.uuid4().hex[:12]))
            self._lives.seeds.remember(load, cursor.position)
            letters = Letters(self._lives.log.path, life.table)
            if letters.any:  # of a lake table that was elsewhere, or is no more
                letters.before_load(load, whole=True, now=None, seq=cursor.seq)
            land(self._run, life, schema, (), cursor)
        except TailraceError as error:
            self._failed(life, error)
            return
        life.state = TableState.CATCHING_UP
        life.moved(cursor, schema)

    def _fed(self, waiting: Waiting) -> Waiting:
        """Those that are published."""
        try:
            published = self._source.published()
        except TailraceError as error:
            for life, _ in waiting:
                self._failed(life, error)
            return []
        settings = self._source.settings
        fed: Waiting = []
        for life, wish in waiting:
            own = settings.publication_create and life.insert_only
            wanted = settings.publication_inserts if own else settings.publication
            since = self._known_since.setdefault(life.table, time.monotonic())
            if wanted in published.get(life.table, set()):
                fed.append((life, wish))
            elif time.monotonic() > since + PUBLISHED_SECONDS_MAX or not settings.publication_create:
                self._failed(life, _unpublished(life.table, wanted))
        return fed

    def _show_waiting(self, planned: Planned, way: str) -> None:
        for life, plan, wish in planned:
            life.load = LoadStatus(
                stage="waiting",
                way=way,
                mode=wish.mode.value if wish else LoadMode.REPLACE.value,
                chunks=len(plan.chunks),
                bytes_total=plan.bytes,
            )


def _refuse_meeting(life: TableLife, lives: Lives) -> None:
    """Refuse to make a table where another one is, or is to be."""
    for other in list(lives.tables.values()) if life.cursor is None else ():
        if other is not life and meet(other.place.path, life.place.path):
            raise anothers(life.place.path, other.table, life.table)


def _unpublished(table: TableId, publication: str) -> TableUnpublished:
    return TableUnpublished(
        "the source does not publish the table's changes yet",
        table=table,
        publication=publication,
        hint="Start `tailrace capture` or `tailrace run` again; with `publication: {create: false}`, add the "
        "table to your publication.",
    )
