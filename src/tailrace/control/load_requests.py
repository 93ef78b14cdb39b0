"""What a person asks of tables: load them again, hold loads back, let them go on, give them up, try what has failed.

Only records below `<log>/seed/` are written, so it works whether anything runs or not and outlives both; whoever
applies looks at them several times a second. Everything is checked before the first record is written.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tailrace.capture.postgres.catalogue import Catalogue
from tailrace.capture.postgres.connect import connect
from tailrace.capture.postgres.row_condition import require_valid_condition
from tailrace.capture.postgres.source import PostgresCapture
from tailrace.changelog.read.reader import ChangeLog
from tailrace.changelog.write import log_lease
from tailrace.errors import ConfigError, FormChanged, TailraceError
from tailrace.model.schema import TableId, TableSchema
from tailrace.pipeline.capture.source_factory import open_source_for_log
from tailrace.pipeline.config.settings import PipelineSettings, matches
from tailrace.pipeline.report import TableState
from tailrace.pipeline.status import APPLIER_LEASE, read_status_file
from tailrace.tasks.load_store import LoadHold, LoadMode, LoadRecord, LoadRequest, LoadStore

LOCK_SECONDS_MAX = 5
"""To wait for a table that somebody alters."""
CLOSE_MAX = 3
"""Names that are offered where one matches nothing."""


@dataclass(frozen=True, kw_only=True)
class TableRequestResult:
    """What became of the question for one table."""

    schema: str
    table: str
    done: str
    """`asked`, `replaced` (one that was waiting), `paused`, `resumed`, `stopped`, `retried`, or `nothing`."""
    said: str
    """The same for people."""

    @property
    def name(self) -> str:
        return f"{self.schema}.{self.table}"


@dataclass(frozen=True, kw_only=True)
class LoadRequestResult:
    """What was asked for, table by table, and who will do it."""

    name: str
    action: str
    """`load`, `pause`, `resume`, `stop` or `retry`."""
    tables: tuple[TableRequestResult, ...]
    apply_pid: int | None
    """The process that applies now; None: the next one that is started does it."""
    mode: str | None = None
    where: str | None = None
    note: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def request_loads(
    settings: PipelineSettings, patterns: Sequence[str], *, mode: LoadMode = LoadMode.REPLACE, where: str | None = None
) -> LoadRequestResult:
    """Ask for tables to be loaded again; with a condition, for the rows that fulfil it."""
    if not patterns:
        raise ConfigError(
            "which tables are to be loaded again is not said",
            hint='Name them: `tailrace snapshot FILE public.orders`, or "public.*" for all of a schema.',
        )
    desk = _LoadRequestWriter(settings)
    tables = desk.matching(patterns, desk.at_source if desk.at_source is not None else desk.known)
    for table in tables if where is not None else ():
        settings.tables.spec_of(table).refuse_partial_load(table)
    if where is not None and desk.source_error is not None:
        raise desk.source_error  # nobody else can say whether a condition makes sense
    if where is not None or mode is LoadMode.REFRESH:
        desk.refuse_unfit(tables, where)
    answers = [desk.ask(table, mode, where) for table in tables]
    return desk.answer("load", answers, mode=mode.value, where=where)


def hold_loads(settings: PipelineSettings, patterns: Sequence[str], what: LoadHold | None) -> LoadRequestResult:
    """Hold loads of these tables back, or let them go on; without a pattern those of all tables."""
    desk = _LoadRequestWriter(settings)
    tables = desk.matching(patterns, desk.known) if patterns else sorted(desk.known)
    act, action = {
        LoadHold.PAUSED: (desk.pause, "pause"),
        LoadHold.STOPPED: (desk.stop, "stop"),
        None: (desk.resume, "resume"),
    }[what]
    return desk.answer(action, [act(table) for table in tables])


def request_retries(settings: PipelineSettings, patterns: Sequence[str]) -> LoadRequestResult:
    """Have tables that have failed tried again; without a pattern all that have."""
    desk = _LoadRequestWriter(settings)
    tables = desk.matching(patterns, desk.known) if patterns else desk.failed()
    return desk.answer("retry", [desk.retry(table) for table in tables])


class _LoadRequestWriter:
    """The log's records as they are now, and what may be written beside them."""

    def __init__(self, settings: PipelineSettings) -> None:
        self._settings = settings
        self._log = ChangeLog.open(settings.log.path)
        self._source: PostgresCapture = open_source_for_log(settings, self._log)
        self._seeds = LoadStore(self._log.path)
        self._log.schemas.load()
        begun = self._seeds.unfinished_loads()
        self._loads = {seed.table: seed for seed in begun if self._seeds.catch_up_until(seed.id) is None}
        self._begun = {seed.request.id for seed in begun if seed.request is not None}
        self._held = self._seeds.holds()
        self.source_error: TailraceError | None = None
        """Why the source did not answer."""
        self.at_source: set[TableId] | None = None
        try:
            self.at_source = {table.table for table in self._source.tables()}
        except TailraceError as error:
            self.source_error = error
        self._noted = read_status_file(self._log.path)
        told = {version.schema.table for version in self._log.schemas.latest()} | set(self._noted)
        told |= set(self._loads) | set(self._held) | {wish.table for wish in self._seeds.requests()}
        self.known = {table for table in told if settings.has(table)} | (self.at_source or set())

    def answer(self, action: str, tables: Iterable[TableRequestResult], **more: str | None) -> LoadRequestResult:
        note = None
        if self.source_error is not None:
            note = f"the source was not asked which tables there are: {self.source_error.headline}"
        pid = log_lease.live_holder_pid(self._log.path, APPLIER_LEASE)
        return LoadRequestResult(
            name=self._settings.name, action=action, tables=tuple(tables), apply_pid=pid, note=note, **more
        )

    def matching(self, patterns: Sequence[str], tables: set[TableId]) -> list[TableId]:
        found: set[TableId] = set()
        for pattern in patterns:
            only = self._settings.source.model_copy(update={"tables": (pattern,), "exclude": ()})
            some = {table for table in tables if matches(only, table) or str(table) == pattern}
            if not some:
                raise _unmatched(pattern, tables, gone=pattern in map(str, self.known))
            found |= some
        return sorted(found)

    def refuse_unfit(self, tables: Sequence[TableId], where: str | None) -> None:
        """Refuse what a load would only refuse later."""
        if self.source_error is not None:
            latest = {version.schema.table: version.schema for version in self._log.schemas.latest()}
            for table in tables:
                if table in latest:
                    _refuse_keyless(latest[table])
            return
        publications = self._source.settings.publications
        with connect(self._source.settings.url) as connection:
            connection.execute(f"set lock_timeout = '{LOCK_SECONDS_MAX}s'")
            for table in tables:
                shape = self._shape(table)
                own = self._source.name_at_source(table)
                schema = Catalogue(connection).describe(own, None if shape is None else publications)
                _refuse_keyless(schema)
                if where is None:
                    continue
                if shape is None or not shape.source_schema.same_rows(schema):
                    why = "it is not loaded yet" if shape is None else "it has another shape than its lake table"
                    raise ConfigError(
                        f"no part of the table can be read again: {why}",
                        table=table,
                        hint="Ask without --where: the whole table is loaded.",
                    )
                require_valid_condition(connection, schema, where)

    def _shape(self, table: TableId) -> TableSchema | None:
        try:
            return self._settings.tables.layout.location(table, self._log.log_id).open_for_reading().schema()
        except FormChanged:
            return None  # there is none of the form that is asked for

    def _loaded(self, table: TableId) -> bool:
        try:
            return self._shape(table) is not None
        except TailraceError:
            return True  # there is something, whatever is wrong with it

    def _waiting(self, table: TableId) -> list[LoadRequest]:
        return [wish for wish in self._seeds.requests() if wish.table == table and wish.id not in self._begun]

    # One table each.

    def ask(self, table: TableId, mode: LoadMode, where: str | None) -> TableRequestResult:
        load, hold, waiting = self._loads.get(table), self._held.get(table), self._waiting(table)
        if hold is LoadHold.STOPPED:
            self._seeds.set_hold(table, None)  # before the wish: a stop takes wishes with it
        self._seeds.add_request(LoadRequest(table=table, mode=mode, where=where))
        for wish in waiting:
            self._seeds.complete_request(wish)
        said = ["rows that fulfil the condition are read again" if where is not None else "it is read again"]
        if where is not None or (mode is LoadMode.REFRESH and self._loaded(table)):
            said.append("only what differs is written")
        if waiting:
            said.append("this replaces what was asked for before and had not begun")
        if load is not None:
            said.append("it begins when the load that is under way has landed")
        if hold is LoadHold.PAUSED:
            said.append("it waits, for loads of the table are paused: `--resume` lets it begin")
        return _answer(table, "replaced" if waiting else "asked", *said)

    def pause(self, table: TableId) -> TableRequestResult:
        hold, load = self._held.get(table), self._loads.get(table)
        if hold is not None:
            return _answer(table, "nothing", f"loads of it are {hold.value} already")
        self._seeds.set_hold(table, LoadHold.PAUSED)
        if load is not None:
            return _answer(
                table, "paused", f"chunks that are being read end, and no more begin ({self._progress(load)})"
            )
        if self._waiting(table):
            return _answer(table, "paused", "the load that was asked for does not begin")
        if not self._loaded(table):
            return _answer(table, "paused", "it is not loaded until it is resumed")
        return _answer(table, "paused", "nothing of it is being loaded, and no load begins until it is resumed")

    def resume(self, table: TableId) -> TableRequestResult:
        if table not in self._held:
            return _answer(table, "nothing", "its loads are not held back")
        self._seeds.set_hold(table, None)
        load = self._loads.get(table)
        if load is not None:
            return _answer(table, "resumed", f"its load goes on ({self._progress(load)})")
        if self._waiting(table):
            return _answer(table, "resumed", "the load that was asked for begins")
        return _answer(table, "resumed", "loads may begin again" if self._loaded(table) else "it is loaded")

    def stop(self, table: TableId) -> TableRequestResult:
        load, waiting, loaded = self._loads.get(table), self._waiting(table), self._loaded(table)
        if load is None and not waiting and loaded:
            return _answer(table, "nothing", "nothing of it is being loaded")
        if not loaded:
            # It stays unloaded, whoever asked for it before; a wish of its own would be taken for a reload.
            for wish in waiting:
                self._seeds.complete_request(wish)
        self._seeds.set_hold(table, LoadHold.STOPPED)
        if loaded:
            what = "the load is given up" if load is not None else "the load that was asked for does not begin"
            rest = "the table goes on as it was, unless it had to be loaded anew: then it needs a snapshot"
            return _answer(table, "stopped", what, rest)
        rest = "it is not loaded until it is asked for, or resumed"
        return _answer(table, "stopped", *(["the load is given up"] if load is not None else []), rest)

    def failed(self) -> list[TableId]:
        """The tables that have, as the process that applies said last."""
        return sorted(table for table in self.known if self._state(table) is TableState.FAILED)

    def retry(self, table: TableId) -> TableRequestResult:
        state = self._state(table)
        if state is TableState.NEEDS_SNAPSHOT:
            return _answer(table, "nothing", "trying again cannot help: it needs `tailrace snapshot`")
        if state is not TableState.FAILED:
            return _answer(table, "nothing", f"it has not failed: it is {state.value if state else 'unknown yet'}")
        self._seeds.request_retry(table)
        return _answer(table, "retried", f"it is tried again ({self._noted[table].get('reason')})")

    def _state(self, table: TableId) -> TableState | None:
        said = self._noted.get(table, {}).get("state")
        return TableState(said) if said else None

    def _progress(self, load: LoadRecord) -> str:
        return f"{len(self._seeds.staged_chunks(load.id)):,} of {len(load.plan.chunks):,} chunks are in"


def _answer(table: TableId, done: str, *said: str) -> TableRequestResult:
    return TableRequestResult(schema=table.schema, table=table.name, done=done, said="; ".join(said))


def _refuse_keyless(schema: TableSchema) -> None:
    if not schema.key:
        raise ConfigError(
            "a table without a key can only be replaced as a whole",
            table=schema.table,
            hint="Leave out --where and --mode refresh, or give the table a primary key.",
        )


def _unmatched(pattern: str, tables: set[TableId], *, gone: bool) -> ConfigError:
    if gone:
        return ConfigError(
            "the source does not have this table any more",
            table=pattern,
            hint="Was it dropped or renamed? Its lake table stays as it is.",
        )
    return ConfigError(f"`{pattern}` matches no table of this pipeline", hint=suggest_tables(pattern, tables))


def suggest_tables(pattern: str, tables: Collection[TableId]) -> str:
    """A hint: what may have been meant."""
    # By the table's own name: what schemas have in common makes everything look alike.
    names = difflib.get_close_matches(pattern.rpartition(".")[2], {table.name for table in tables}, n=CLOSE_MAX)
    close = [str(table) for name in names for table in sorted(tables) if table.name == name]
    if close:
        return f"Did you mean {' or '.join(close[:CLOSE_MAX])}?"
    return "`tailrace status FILE` lists the tables; `source.tables` and `source.exclude` decide which there are."
