"""Store what a person asks of tables: load, pause, resume, stop, or retry.

Only records below `<log>/seed/` are written, so this works whether a process runs or not, and survives restarts. The
applying process reads the records several times a second. Everything is checked before the first record is written.
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
from tailrace.pipeline.config.settings import PipelineSettings
from tailrace.pipeline.config.source_settings import matches
from tailrace.pipeline.report import TableState
from tailrace.pipeline.status import APPLIER_LEASE, read_status_file
from tailrace.tasks.load_store import LoadHold, LoadMode, LoadRecord, LoadRequest, LoadStore

LOCK_SECONDS_MAX = 5
"""Seconds to wait for a lock on a table that is being altered."""
CLOSE_MAX = 3
"""Number of similar names to suggest."""


@dataclass(frozen=True, kw_only=True)
class TableRequestResult:
    """The answer to a request, for one table."""

    schema: str
    table: str
    done: str
    """`asked`, `replaced` (an earlier request), `paused`, `resumed`, `stopped`, `retried`, or `nothing`."""
    said: str
    """The same as text for people."""

    @property
    def name(self) -> str:
        return f"{self.schema}.{self.table}"


@dataclass(frozen=True, kw_only=True)
class LoadRequestResult:
    """The answer to a request, table by table, and the process that will do it."""

    name: str
    action: str
    """`load`, `pause`, `resume`, `stop` or `retry`."""
    tables: tuple[TableRequestResult, ...]
    apply_pid: int | None
    """The process that applies now; None: the next one that starts does it."""
    mode: str | None = None
    where: str | None = None
    note: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def request_loads(
    settings: PipelineSettings, patterns: Sequence[str], *, mode: LoadMode = LoadMode.REPLACE, where: str | None = None
) -> LoadRequestResult:
    """Request reloads of tables; with a condition, of the rows that match it."""
    if not patterns:
        raise ConfigError(
            "no table given to reload",
            hint='Name the tables: `tailrace snapshot FILE public.orders`, or "public.*" for a whole schema.',
        )
    writer = _LoadRequestWriter(settings)
    tables = writer.matching(patterns, writer.at_source if writer.at_source is not None else writer.known)
    for table in tables if where is not None else ():
        settings.tables.spec_of(table).refuse_partial_load(table)
    if where is not None and writer.source_error is not None:
        raise writer.source_error  # only the source can check a condition
    if where is not None or mode is LoadMode.REFRESH:
        writer.refuse_unfit(tables, where)
    answers = [writer.ask(table, mode, where) for table in tables]
    return writer.answer("load", answers, mode=mode.value, where=where)


def hold_loads(settings: PipelineSettings, patterns: Sequence[str], what: LoadHold | None) -> LoadRequestResult:
    """Pause, stop or resume loads of these tables; without a pattern, of all."""
    writer = _LoadRequestWriter(settings)
    tables = writer.matching(patterns, writer.known) if patterns else sorted(writer.known)
    act, action = {
        LoadHold.PAUSED: (writer.pause, "pause"),
        LoadHold.STOPPED: (writer.stop, "stop"),
        None: (writer.resume, "resume"),
    }[what]
    return writer.answer(action, [act(table) for table in tables])


def request_retries(settings: PipelineSettings, patterns: Sequence[str]) -> LoadRequestResult:
    """Request a retry of failed tables; without a pattern, of all failed tables."""
    writer = _LoadRequestWriter(settings)
    tables = writer.matching(patterns, writer.known) if patterns else writer.failed()
    return writer.answer("retry", [writer.retry(table) for table in tables])


class _LoadRequestWriter:
    """The stored records as they are now, and the writing of new ones."""

    def __init__(self, settings: PipelineSettings) -> None:
        self._settings = settings
        self._log = ChangeLog.open(settings.log.path)
        self._source: PostgresCapture = open_source_for_log(settings, self._log)
        self._load_store = LoadStore(self._log.path)
        self._log.schemas.load()
        unfinished = self._load_store.unfinished_loads()
        self._loads = {
            record.table: record for record in unfinished if self._load_store.catch_up_until(record.id) is None
        }
        self._begun_requests = {record.request.id for record in unfinished if record.request is not None}
        self._holds = self._load_store.holds()
        self.source_error: TailraceError | None = None
        """The error, if the source did not answer."""
        self.at_source: set[TableId] | None = None
        try:
            self.at_source = {table.table for table in self._source.tables()}
        except TailraceError as error:
            self.source_error = error
        self._stored_status = read_status_file(self._log.path)
        known = {version.schema.table for version in self._log.schemas.latest()} | set(self._stored_status)
        known |= set(self._loads) | set(self._holds) | {request.table for request in self._load_store.requests()}
        self.known = {table for table in known if settings.has(table)} | (self.at_source or set())

    def answer(self, action: str, tables: Iterable[TableRequestResult], **more: str | None) -> LoadRequestResult:
        note = None
        if self.source_error is not None:
            note = f"the source could not be asked for its tables: {self.source_error.headline}"
        pid = log_lease.live_holder_pid(self._log.path, APPLIER_LEASE)
        return LoadRequestResult(
            name=self._settings.name, action=action, tables=tuple(tables), apply_pid=pid, note=note, **more
        )

    def matching(self, patterns: Sequence[str], tables: set[TableId]) -> list[TableId]:
        matching: set[TableId] = set()
        for pattern in patterns:
            only = self._settings.source.model_copy(update={"tables": (pattern,), "exclude": ()})
            matched = {table for table in tables if matches(only, table) or str(table) == pattern}
            if not matched:
                raise _unmatched(pattern, tables, gone=pattern in map(str, self.known))
            matching |= matched
        return sorted(matching)

    def refuse_unfit(self, tables: Sequence[TableId], where: str | None) -> None:
        """Refuse requests that the load itself would refuse later."""
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
                lake_schema = self._lake_schema(table)
                source_name = self._source.name_at_source(table)
                schema = Catalogue(connection).describe(source_name, None if lake_schema is None else publications)
                _refuse_keyless(schema)
                if where is None:
                    continue
                if lake_schema is None or not lake_schema.source_schema.same_rows(schema):
                    why = "it is not loaded yet" if lake_schema is None else "its schema differs from its lake table's"
                    raise ConfigError(
                        f"the table cannot be reloaded in part: {why}",
                        table=table,
                        hint="Leave out --where to reload the whole table.",
                    )
                require_valid_condition(connection, schema, where)

    def _lake_schema(self, table: TableId) -> TableSchema | None:
        try:
            return self._settings.tables.layout.location(table, self._log.log_id).open_for_reading().schema()
        except FormChanged:
            return None  # the table does not have the spec of the settings

    def _is_loaded(self, table: TableId) -> bool:
        try:
            return self._lake_schema(table) is not None
        except TailraceError:
            return True  # there is a table, even if it has a problem

    def _waiting(self, table: TableId) -> list[LoadRequest]:
        return [
            request
            for request in self._load_store.requests()
            if request.table == table and request.id not in self._begun_requests
        ]

    # One table each.

    def ask(self, table: TableId, mode: LoadMode, where: str | None) -> TableRequestResult:
        load, hold, waiting = self._loads.get(table), self._holds.get(table), self._waiting(table)
        if hold is LoadHold.STOPPED:
            self._load_store.set_hold(table, None)  # before the request: a stop removes requests
        self._load_store.add_request(LoadRequest(table=table, mode=mode, where=where))
        for request in waiting:
            self._load_store.complete_request(request)
        texts = ["rows that match the condition are reloaded" if where is not None else "it is reloaded"]
        if where is not None or (mode is LoadMode.REFRESH and self._is_loaded(table)):
            texts.append("only changed rows are written")
        if waiting:
            texts.append("this replaces an earlier request that had not started")
        if load is not None:
            texts.append("it starts after the current load")
        if hold is LoadHold.PAUSED:
            texts.append("it waits because loads of the table are paused: `--resume` starts it")
        return _answer(table, "replaced" if waiting else "asked", *texts)

    def pause(self, table: TableId) -> TableRequestResult:
        hold, load = self._holds.get(table), self._loads.get(table)
        if hold is not None:
            return _answer(table, "nothing", f"its loads are already {hold.value}")
        self._load_store.set_hold(table, LoadHold.PAUSED)
        if load is not None:
            return _answer(table, "paused", f"running chunks finish, and no new ones start ({self._progress(load)})")
        if self._waiting(table):
            return _answer(table, "paused", "the requested load does not start")
        if not self._is_loaded(table):
            return _answer(table, "paused", "it is not loaded until it is resumed")
        return _answer(table, "paused", "it is not being loaded, and no load starts until it is resumed")

    def resume(self, table: TableId) -> TableRequestResult:
        if table not in self._holds:
            return _answer(table, "nothing", "its loads are neither paused nor stopped")
        self._load_store.set_hold(table, None)
        load = self._loads.get(table)
        if load is not None:
            return _answer(table, "resumed", f"its load continues ({self._progress(load)})")
        if self._waiting(table):
            return _answer(table, "resumed", "the requested load starts")
        return _answer(table, "resumed", "loads may start again" if self._is_loaded(table) else "it is loaded")

    def stop(self, table: TableId) -> TableRequestResult:
        load, waiting, loaded = self._loads.get(table), self._waiting(table), self._is_loaded(table)
        if load is None and not waiting and loaded:
            return _answer(table, "nothing", "it is not being loaded")
        if not loaded:
            # It stays unloaded despite earlier requests: a stored request would be taken for a reload.
            for request in waiting:
                self._load_store.complete_request(request)
        self._load_store.set_hold(table, LoadHold.STOPPED)
        if loaded:
            what = "the load is cancelled" if load is not None else "the requested load does not start"
            rest = "the table continues as before, unless it needed this load: then it needs a snapshot"
            return _answer(table, "stopped", what, rest)
        rest = "it is not loaded until a load is requested or resumed"
        return _answer(table, "stopped", *(["the load is cancelled"] if load is not None else []), rest)

    def failed(self) -> list[TableId]:
        """Return the tables that have failed, as the applying process last reported."""
        return sorted(table for table in self.known if self._state(table) is TableState.FAILED)

    def retry(self, table: TableId) -> TableRequestResult:
        state = self._state(table)
        if state is TableState.NEEDS_SNAPSHOT:
            return _answer(table, "nothing", "a retry cannot help: it needs `tailrace snapshot`")
        if state is not TableState.FAILED:
            return _answer(table, "nothing", f"it has not failed: it is {state.value if state else 'unknown yet'}")
        self._load_store.request_retry(table)
        return _answer(table, "retried", f"it is retried ({self._stored_status[table].get('reason')})")

    def _state(self, table: TableId) -> TableState | None:
        state = self._stored_status.get(table, {}).get("state")
        return TableState(state) if state else None

    def _progress(self, load: LoadRecord) -> str:
        return f"{len(self._load_store.staged_chunks(load.id)):,} of {len(load.plan.chunks):,} chunks are done"


def _answer(table: TableId, done: str, *texts: str) -> TableRequestResult:
    return TableRequestResult(schema=table.schema, table=table.name, done=done, said="; ".join(texts))


def _refuse_keyless(schema: TableSchema) -> None:
    if not schema.key:
        raise ConfigError(
            "a table without a key can only be reloaded as a whole",
            table=schema.table,
            hint="Leave out --where and --mode refresh, or give the table a primary key.",
        )


def _unmatched(pattern: str, tables: set[TableId], *, gone: bool) -> ConfigError:
    if gone:
        return ConfigError(
            "the source no longer has this table",
            table=pattern,
            hint="Check if it was dropped or renamed. Its lake table stays as it is.",
        )
    return ConfigError(f"`{pattern}` matches no table of this pipeline", hint=suggest_tables(pattern, tables))


def suggest_tables(pattern: str, tables: Collection[TableId]) -> str:
    """Return a hint with the names that may have been meant."""
    # Compare the table's own name: a common schema name makes all of them look alike.
    names = difflib.get_close_matches(pattern.rpartition(".")[2], {table.name for table in tables}, n=CLOSE_MAX)
    close = [str(table) for name in names for table in sorted(tables) if table.name == name]
    if close:
        return f"Did you mean {' or '.join(close[:CLOSE_MAX])}?"
    return "See `tailrace status FILE` for the tables; `source.tables` and `source.exclude` select them."
