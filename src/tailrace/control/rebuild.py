"""`tailrace rebuild`: a lake table made anew from one of its own versions, or from what is kept of its last load, and
the log; the source is not asked.

The newest is taken that is known to hold what its position says and that the log can bring to the end. Changes are
applied to a table beside it, stretch by stretch as a pipeline applies them, and one commit swaps the two. Nothing else
applies meanwhile: the applier's lease is held.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tailrace.changelog.read import consumers
from tailrace.changelog.read.consumers import TableHint
from tailrace.changelog.read.reader import ChangeLog
from tailrace.changelog.read.row_steps import upto_position
from tailrace.changelog.write.log_lease import Lease
from tailrace.control.load_requests import closest
from tailrace.deadletters.store import Letters
from tailrace.errors import LOAD_ANEW_HINT, ConfigError, LogBusy, LogTrimmed, SchemaChanged
from tailrace.model.position import ZERO, Lsn
from tailrace.model.schema import TableId
from tailrace.pipeline.capture.source_factory import open_source
from tailrace.pipeline.config.settings import PipelineSettings
from tailrace.pipeline.report import TableState
from tailrace.pipeline.status import APPLIER, NOTE, known_tables
from tailrace.pipeline.tables.registry import Lives, Stretch, TableLife
from tailrace.storage import files
from tailrace.tables.delta.load_snapshots import KeptSeeds
from tailrace.tables.delta.rebuild_table import Base, bases_with
from tailrace.tables.location import Place
from tailrace.tables.port import Cursor
from tailrace.tables.position_errors import refuse_form
from tailrace.tasks.rebuild_backend import DeltaMaker, Maker, Making
from tailrace.tasks.work import ApplyWork

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LEASE_SECONDS_MAX = 2.0
BEFORE_ALL = -1
"""A seed has no version that rows were put into later."""
NO_TABLE = "there is no lake table, and nothing is kept of a load of it"
_TOO_NEW = "it is newer than the position that is asked for"
Progress = Callable[[int, int], None]
"""Called with how many changes are replayed, and how many there are."""


@dataclass(frozen=True, kw_only=True)
class Rebuilt:
    """What a rebuild did."""

    schema: str
    table: str
    base_version: int | None
    """None for a seed: that is none of the table's versions."""
    base: str
    """`load`: as a load has landed it; `version`: with changes since; `seed`: what is kept of a load."""
    base_position: str
    base_rows: int
    changes: int
    """How many were replayed."""
    position: str
    commit: int
    rows: int
    version: int
    seconds: float

    @property
    def name(self) -> str:
        return f"{self.schema}.{self.table}"

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "seconds": round(self.seconds, 3)}


def rebuild(
    settings: PipelineSettings,
    name: str,
    *,
    to: str | None,
    from_version: int | None,
    progress: Progress,
    spark: SparkSession | None = None,
) -> Rebuilt:
    """Make the table anew, at a position of the log or at its end. An Iceberg table needs a session with the connector:
    one is started if it is not given."""
    log = ChangeLog.open(settings.log.path)
    table, position = _known(settings, log, name), None if to is None else Lsn.parse(to)
    try:
        held = Lease(log.path, APPLIER, wait_seconds=LEASE_SECONDS_MAX)
    except LogBusy as busy:
        raise LogBusy(
            "a process applies to the tables",
            **busy.fields,
            hint="Stop that `tailrace run` or `tailrace apply` first; capture may go on.",
        ) from busy
    try:
        with _maker(settings, log, table, spark) as maker:
            return _Rebuild(settings, log, table, position, maker).run(from_version, progress)
    finally:
        held.release()


@contextmanager
def _maker(settings: PipelineSettings, log: ChangeLog, table: TableId, spark: SparkSession | None) -> Iterator[Maker]:
    """Who makes the new table."""
    place = settings.tables.layout.place(table, log.log_id)
    if place.catalog is None:
        yield DeltaMaker(place)
        return
    # Spark is slow to import, and a Delta table does without it.
    from tailrace.pipeline.apply.spark_start import SparkAtNeed
    from tailrace.spark.writers.iceberg_rebuild import IcebergMaker

    with SparkAtNeed(settings, log, spark) as session:
        yield IcebergMaker(place, session.get)


class _Rebuild:
    def __init__(
        self, settings: PipelineSettings, log: ChangeLog, table: TableId, to: Lsn | None, maker: Maker
    ) -> None:
        self._settings, self._log, self._table, self._to, self._maker = settings, log, table, to, maker
        # How the source writes values is known without asking it.
        value_of = open_source(settings, log.log_id).value_of
        self._lives = Lives(log, settings.tables.layout, settings.tables.policies_of, value_of, until=to)
        self._place = settings.tables.layout.place(table, log.log_id)
        self._seeds = KeptSeeds(settings.tables.path, log.log_id).of(table)
        self._whole_after = ZERO
        """Rows of the base may be as new as this."""
        newest = self._lives.grow()
        self._index = self._lives.index
        if to is not None and to > self._index.position:
            raise ConfigError(
                "the log does not reach this position",
                to=to,
                log_position=self._index.position,
                hint="Give a position up to there, or leave `--to` out.",
            )
        self._end = newest if to is None else self._index.commit_at(to)
        self._end_seq = self._index.next_seq(self._end) - 1

    def run(self, from_version: int | None, progress: Progress) -> Rebuilt:
        started = time.monotonic()
        self._place.look().refuse_foreign(self._table)
        base = self._base(from_version)
        with self._maker.making() as making:
            rows = making.begin(base)
            life = self._life(base, making.made_at)
            self._whole_after = self._mixed_until(life) or ZERO
            changes = self._replay(making, life, progress)
            cursor = base.position.cursor if life.once else self._cursor(base)
            self._hold(life, cursor)
            rows_now = making.swap(cursor)
        self._forget_failure()
        version = self._place.look().version()
        assert version is not None, "just swapped"
        return Rebuilt(
            schema=self._table.schema,
            table=self._table.name,
            base_version=None if base.seed else base.version,
            base="seed" if base.seed else "load" if base.loaded else "version",
            base_position=str(base.position.cursor.position),
            base_rows=rows,
            changes=changes,
            position=str(cursor.position),
            commit=cursor.commit,
            rows=rows_now,
            version=version,
            seconds=time.monotonic() - started,
        )

    # The base.

    def _base(self, wanted: int | None) -> Base:
        """The newest that will do, or the version that is wished for."""
        why: str | None = None
        newest: Base | None = None
        first: Base | None = None
        for base in bases_with(self._place, self._seeds):
            if wanted is not None and (base.version != wanted or base.seed is not None):
                continue
            reason = self._unusable(base)
            if reason is None:
                return base
            if reason == _TOO_NEW and wanted is None:
                first = base  # what stands before the position says why that will not do, if there is one
                continue
            newest = newest or base
            why = why or f"{'the kept seed' if base.seed else f'version {base.version}'}: {reason}"
        if wanted is not None:
            raise ConfigError(
                "the table cannot be rebuilt from this version",
                table=self._table,
                version=wanted,
                why=why or "no commit of this log made it, or the table no longer remembers it",
                hint="Leave `--from-version` out: the newest that will do is taken.",
            )
        if why is None and first is not None:
            raise LogTrimmed(
                "nothing is left of the table that is as old as this",
                table=self._table,
                to=self._to,
                hint=f"Give a position from {first.position.cursor.position} on, or leave `--to` out.",
            )
        if newest is not None:  # a load would replace the past as well, and that is a person's to say
            refuse_form(self._place.path, self._place.form, newest.position)
        never = self._place.look().version() is None
        raise LogTrimmed(
            "the log covers no version of the table that it could be rebuilt from",
            table=self._table,
            why=why or (NO_TABLE if never else "the table has no version of this log"),
            hint="`tailrace run FILE` loads it, unless it is held back." if never else LOAD_ANEW_HINT,
        )

    def _unusable(self, base: Base) -> str | None:
        """Why the table cannot be rebuilt from this version."""
        cursor, life = base.position.cursor, self._life(base, self._place)
        if not self._place.form.alike(base.position.form, base.position.schema):
            return f"it was made as {base.position.form.described}"
        if cursor.commit > self._index.commit:
            return "it holds more than the log does"
        if self._to is not None and cursor.position > self._to:
            return _TOO_NEW
        if self._to is not None and base.recast and not self._has_come(life):
            return "it has a shape that came after the position that is asked for"
        if (mixed := self._mixed(base, life)) is not None:
            return mixed
        if (gone := self._index.lacks_after(self._lives.numbers(life), cursor.seq, cursor.position)) is not None:
            return f"the log no longer holds the changes after it ({gone.why})"
        if not life.once and self._lives.lacks_from(life) is not None:
            return "changes after it were never captured"
        letters = Letters(self._log.path, self._table)
        first = letters.first
        version = BEFORE_ALL if base.seed else base.version
        if first is not None and self._end_seq >= first and not letters.over(cursor.seq, cursor.load, version):
            return "changes after it, or at it, were or are in dead letters"
        if base.seed is not None:
            return None if base.seed.sound else "files of it are gone, or are not what they were"
        return self._maker.lacks(base)

    def _mixed(self, base: Base, life: TableLife) -> str | None:
        """Why a base will not do some of whose rows are newer than others, for they were read at different times. Of a
        seed the log makes them one moment's, as it did when the load had landed; see `_take`."""
        load = base.position.cursor.load
        if load is not None and self._lives.seeds.mixed(load) is None:
            return "it is no longer known whether some of its rows are newer than others"
        until = self._mixed_until(life)
        if until is None or (base.seed is not None and until <= (self._to or self._index.position)):
            return None
        return f"some of its rows are newer than others, up to {until}"

    def _mixed_until(self, life: TableLife) -> Lsn | None:
        """What the log must pass for the table to be one moment's; None if it is that. So it also is where the log has
        passed that, and had nothing for the table on the way."""
        cursor = life.cursor
        assert cursor is not None, "a base has one"
        until = None if cursor.load is None else self._lives.seeds.mixed_until(cursor.load, cursor.position)
        if until is None or self._index.position < until:
            return until
        pending = self._lives.pending(life, self._index.commit)
        return until if any(self._index.start_of(item.first) < until for item in pending) else None

    def _has_come(self, life: TableLife) -> bool:
        """Whether a change of the table's shape is among those that are replayed."""
        shape = life.shape
        assert shape is not None, "a base has one"
        return any(self._lives.shape_of(shape, item).same_as(shape) for item in self._lives.pending(life, self._end))

    def _life(self, base: Base, place: Place) -> TableLife:
        life = TableLife(self._table, place, state=TableState.CATCHING_UP)
        life.cursor, life.shape = base.position.cursor, base.position.schema
        life.once = self._settings.load.mode_of(self._table) == "initial_only"
        return life

    # The replay.

    def _replay(self, making: Making, life: TableLife, progress: Progress) -> int:
        """Apply what the log has up to the end; how many changes."""
        total, done = self._pending(life), 0
        progress(done, total)
        while life.cursor is not None and life.cursor.seq < self._end_seq:
            stretch = self._lives.stretch(life, self._end)
            if stretch is None:
                _refuse_stopped(life)
                break
            done += self._take(making, life, self._clipped(stretch))
            progress(min(done, total), total)
        return done + self._replay_straddling(making, life)

    def _pending(self, life: TableLife) -> int:
        return sum(item.rows for item in self._lives.pending(life, self._end))

    def _clipped(self, stretch: Stretch) -> Stretch:
        """What is sealed lies in groups of many commits, of which the last may go on past the end."""
        if stretch.recast is not None or stretch.cursor.seq <= self._end_seq:
            return stretch
        slices = tuple(replace(item, last_seq=min(item.last_seq, self._end_seq)) for item in stretch.slices)
        position = max(stretch.cursor.position, self._index.end_of(self._end))
        return Stretch(slices, replace(stretch.cursor, seq=self._end_seq, commit=self._end, position=position))

    def _take(self, making: Making, life: TableLife, stretch: Stretch, upto: Lsn | None = None) -> int:
        """One commit of the new table; how many changes came in."""
        assert life.cursor is not None, "a base has one"
        assert life.shape is not None, "a base has one"
        if stretch.recast is not None:
            making.evolve(stretch.recast, life.cursor)
            life.moved(life.cursor, stretch.recast.schema)
            return 0
        work = ApplyWork(
            table=self._table,
            log=self._log.path,
            place=life.place,
            slices=stretch.slices,
            shape=life.shape,
            expected=life.cursor,
            cursor=stretch.cursor,
            upto=upto,
        )
        taken = making.apply(work, mixed=life.cursor.position < self._whole_after)
        life.moved(taken.cursor, life.shape)
        return taken.changes

    def _replay_straddling(self, making: Making, life: TableLife) -> int:
        """The commit that the position lies in: those of its transactions that ended at or before it."""
        if self._to is None or self._to <= self._index.end_of(self._end) or life.once:
            return 0
        after, done = self._end + 1, 0
        while pending := [item for item in self._lives.pending(life, after) if item.first <= after <= item.last]:
            # Looked at first: a shape that comes later must not be taken on.
            batches = self._log.read(
                after,
                after,
                tables=[pending[0].table],
                after_seq=life.cursor.seq if life.cursor else 0,
                to_seq=pending[0].last_seq,
            )
            if not any(upto_position(batch, self._to).data.num_rows for batch in batches if batch.data.num_rows):
                break
            stretch = self._lives.stretch(life, after)
            if stretch is None:
                _refuse_stopped(life)
                break
            before = done
            done += self._take(making, life, stretch, self._to)
            if stretch.recast is None and done == before:
                break
        return done

    # The end.

    def _cursor(self, base: Base) -> Cursor:
        """Where the table stands then."""
        was = base.position.cursor
        if self._to is not None:
            return replace(self._lives.cursor_at(self._to), load=was.load)
        return Cursor(
            seq=max(was.seq, self._end_seq),
            commit=max(was.commit, self._end),
            position=max(was.position, self._index.position),
            load=was.load,
        )

    def _hold(self, life: TableLife, cursor: Cursor) -> None:
        """Have the log keep what the table will lack, before it does."""
        others = [hint for hint in consumers.hints(self._log.path) if hint.table != self._table]
        numbers = tuple(self._lives.numbers(life))
        mine = TableHint(table=self._table, numbers=numbers, commit=cursor.commit, seq=cursor.seq)
        consumers.leave_hints(self._log.path, [*others, mine])

    def _forget_failure(self) -> None:
        """Why a process gave up the table of before is over; what it was loaded with stays known."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            path = self._log.path / NOTE
            stored = json.loads(path.read_bytes())
            for item in stored["tables"]:
                if TableId.from_json(item) == self._table:
                    item.update(state=TableState.CATCHING_UP.value, reason=None, detail=None, hint=None)
            files.replace(path, json.dumps(stored).encode())


def _refuse_stopped(life: TableLife) -> None:
    """Raise why the table goes no further; nothing, if there is nothing left to do."""
    if life.refresh is not None:
        raise SchemaChanged(
            "the log alone does not bring the table over a change of its shape",
            table=life.table,
            why=life.refresh,
            hint=LOAD_ANEW_HINT,
        )
    if life.state.broken and life.error is not None:
        raise life.error


def _known(settings: PipelineSettings, log: ChangeLog, name: str) -> TableId:
    """The table of this name that the log knows and the settings match."""
    wanted = sorted(table for table in known_tables(log) if settings.has(table))
    found = [table for table in wanted if str(table) == name]
    if len(found) == 1:
        return found[0]
    raise ConfigError(
        f"`{name}` is no table of this pipeline" if not found else f"`{name}` names two tables",
        hint=closest(name, wanted),
    )
