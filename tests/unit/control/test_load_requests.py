"""Load requests and holds: only records are written, and none that a load would refuse."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tailrace.capture.postgres.catalogue import Catalogue
from tailrace.capture.postgres.chunks import ChunkKind
from tailrace.capture.postgres.connect import connect
from tailrace.changelog.read.reader import ChangeLog
from tailrace.changelog.write.log_lease import LogLease
from tailrace.control import load_requests
from tailrace.demo.server import EmbeddedPostgres
from tailrace.errors import ConfigError, LogUnusable, SourceUnreachable, TailraceError, Unsupported
from tailrace.model.position import ZERO, Lsn
from tailrace.model.schema import TableId
from tailrace.pipeline.capture.source_factory import open_source
from tailrace.pipeline.config.settings import PipelineSettings
from tailrace.pipeline.config.settings_file import load_settings
from tailrace.pipeline.status import APPLIER_LEASE, STATUS_FILE
from tailrace.tables.delta.table import DeltaRsTable
from tailrace.tables.port import AppliedPosition
from tailrace.tables.table_paths import table_path
from tailrace.tasks.load_store import FOLDER, LoadHold, LoadMode, LoadRecord, LoadRequest, LoadStore, StagedChunk
from tests.support.databases import database
from tests.support.logs import Diary

ORDERS, CUSTOMERS, NO_KEY, PARTS = (TableId("public", name) for name in ("orders", "customers", "no_key", "parts"))
NEVER = TableId("public", "never_loaded")
SQL = """
create table orders (id int primary key, status text, "Total" numeric(12,2));
create table customers (id int primary key, name text);
create table never_loaded (id int primary key);
create table no_key (a int);
create table parts (id int primary key, x int) partition by range (id);
create table parts_1 partition of parts for values from (0) to (100);
create table audit (id int primary key);
insert into orders values (1, 'a secret value', 5);
"""
SETTINGS = """\
name: shop
source:
  url: {url}
  tables: ["public.*"]
  exclude: ["public.audit"]
log: ./log
tables: {{path: ./lake}}
"""


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(version=16, settings={"fsync": "off"}) as running:
        yield running


@pytest.fixture(scope="module")
def url(server: EmbeddedPostgres) -> Iterator[str]:
    with database(server, f"asking_{uuid.uuid4().hex[:8]}") as name:
        with psycopg.connect(server.url(name), autocommit=True) as connection:
            connection.execute(SQL)
        yield server.url(name)


@pytest.fixture
def settings(url: str, tmp_path: Path) -> PipelineSettings:
    """A pipeline with a log, whose tables are loaded except one."""
    (tmp_path / "tailrace.yaml").write_text(SETTINGS.format(url=url))
    found = load_settings(tmp_path / "tailrace.yaml")
    Diary(tmp_path / "log").close()
    log_id = ChangeLog.open(tmp_path / "log").log_id
    # Capture makes publications; this one has every column.
    with psycopg.connect(url, autocommit=True) as admin:
        admin.execute(f"drop publication if exists tailrace_{log_id}")
        admin.execute(f"create publication tailrace_{log_id} for all tables with (publish_via_partition_root)")
    with connect(url) as connection:
        for table in (ORDERS, CUSTOMERS, NO_KEY, PARTS):
            schema = Catalogue(connection).describe(table, None)
            lake = DeltaRsTable(table_path(found.tables.path, table), log_id)
            lake.commit_load(schema, [], AppliedPosition(seq=0, commit=0, position=ZERO))
    return found


@pytest.fixture
def silent(settings: PipelineSettings, tmp_path: Path) -> PipelineSettings:
    """The same pipeline with a source that does not answer; its log knows some tables."""
    (tmp_path / "tailrace.yaml").write_text(SETTINGS.format(url="postgresql://app@127.0.0.1:1/shop"))
    return load_settings(tmp_path / "tailrace.yaml")


@pytest.fixture
def load_store(settings: PipelineSettings) -> LoadStore:
    return LoadStore(settings.log.path)


def records(settings: PipelineSettings) -> list[str]:
    return sorted(path.name for path in Path(str(settings.log.path), FOLDER).rglob("*.json"))


def begin(
    settings: PipelineSettings, load_store: LoadStore, table: TableId, request: LoadRequest | None = None
) -> LoadRecord:
    """Store a running load, as an applying process would: one chunk is done."""
    log_id = ChangeLog.open(settings.log.path).log_id
    record = LoadRecord(
        plan=open_source(settings, log_id).plan(table, ChunkKind.KEY, 1 << 20),
        snapshot_position=Lsn(1),
        request=request,
    )
    load_store.begin(record)
    load_store.record_chunk(record.id, StagedChunk(chunk=0, files=(), rows=0, bytes=0, seconds=0.1, seen_until=Lsn(1)))
    return record


def answer(asked: load_requests.LoadRequestResult, table: TableId) -> tuple[str, str]:
    """Return what was done for a table, and its text."""
    found = next(item for item in asked.tables if (item.schema, item.table) == (table.schema, table.name))
    return found.done, found.said


# ---- requests


def test_a_request_is_stored_for_every_table_that_matches(settings: PipelineSettings, load_store: LoadStore) -> None:
    asked = load_requests.request_loads(settings, ["public.orders", "public.cust*"], mode=LoadMode.REFRESH)
    assert {(request.table, request.mode, request.where) for request in load_store.requests()} == {
        (ORDERS, LoadMode.REFRESH, None),
        (CUSTOMERS, LoadMode.REFRESH, None),
    }
    assert [table.done for table in asked.tables] == ["asked", "asked"]
    assert asked.apply_pid is None


def test_the_applying_process_is_named(settings: PipelineSettings) -> None:
    lease = LogLease(settings.log.path, APPLIER_LEASE)
    try:
        assert load_requests.request_loads(settings, ["public.orders"]).apply_pid is not None
    finally:
        lease.release()


def test_a_new_request_replaces_a_waiting_one(settings: PipelineSettings, load_store: LoadStore) -> None:
    load_requests.request_loads(settings, ["public.orders"], where="id > 5")
    asked = load_requests.request_loads(settings, ["public.orders"])
    (request,) = load_store.requests()
    assert request.where is None
    done, text = answer(asked, ORDERS)
    assert done == "replaced"
    assert "replaces an earlier request" in text


def test_a_request_during_a_load_waits_for_it(settings: PipelineSettings, load_store: LoadStore) -> None:
    under_way = LoadRequest(table=ORDERS, where="id > 5")
    load_store.add_request(under_way)
    begin(settings, load_store, ORDERS, under_way)
    done, text = answer(load_requests.request_loads(settings, ["public.orders"]), ORDERS)
    assert done == "asked"
    assert "starts after the current load" in text
    assert under_way in load_store.requests(), "it stays requested in case the load fails"
    assert len(load_store.requests()) == 2


def test_a_request_lifts_a_stop_and_waits_for_a_pause(settings: PipelineSettings, load_store: LoadStore) -> None:
    load_store.set_hold(ORDERS, LoadHold.STOPPED)
    load_store.set_hold(CUSTOMERS, LoadHold.PAUSED)
    asked = load_requests.request_loads(settings, ["public.orders", "public.customers"])
    assert load_store.holds() == {CUSTOMERS: LoadHold.PAUSED}
    assert "paused: `--resume`" in answer(asked, CUSTOMERS)[1]


def test_a_load_of_an_unloaded_table_can_be_requested(settings: PipelineSettings, load_store: LoadStore) -> None:
    load_requests.request_loads(settings, ["public.never_loaded"])
    assert [request.table for request in load_store.requests()] == [NEVER]


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("public.order", "Did you mean public.orders?"),
        ("orders", "Did you mean public.orders?"),
        ("sales.orders", "Did you mean public.orders?"),
        ("public.audit", "`source.exclude`"),
        ("sales.*", "See `tailrace status FILE`"),
        ("public.[", "See `tailrace status FILE`"),
        ("", "See `tailrace status FILE`"),
    ],
)
def test_a_name_that_matches_nothing_is_an_error_with_close_names(
    settings: PipelineSettings, pattern: str, hint: str
) -> None:
    with pytest.raises(ConfigError, match="matches no table") as error:
        load_requests.request_loads(settings, ["public.customers", pattern])
    assert hint in error.value.hint
    assert records(settings) == [], "no request is written if any is wrong"


def test_no_table_at_all_is_an_error(settings: PipelineSettings) -> None:
    with pytest.raises(ConfigError, match="no table given"):
        load_requests.request_loads(settings, [])


def test_without_a_log_every_request_is_refused(settings: PipelineSettings, tmp_path: Path) -> None:
    elsewhere = settings.model_copy(update={"log": settings.log.model_copy(update={"path": tmp_path / "other"})})
    with pytest.raises(LogUnusable, match="there is no log here"):
        load_requests.request_loads(elsewhere, ["public.orders"])
    with pytest.raises(LogUnusable, match="there is no log here"):
        load_requests.hold_loads(elsewhere, [], LoadHold.PAUSED)
    assert not (tmp_path / "other").exists()


def test_without_the_source_the_tables_of_the_log_are_used(silent: PipelineSettings) -> None:
    load_store = LoadStore(silent.log.path)
    load_store.set_hold(ORDERS, LoadHold.STOPPED)
    asked = load_requests.request_loads(silent, ["public.orders"])
    assert [request.table for request in load_store.requests()] == [ORDERS]
    assert asked.note is not None
    assert "the source could not be asked" in asked.note
    with pytest.raises(SourceUnreachable):
        load_requests.request_loads(silent, ["public.orders"], where="id > 5")


def test_a_table_that_is_gone_at_the_source_cannot_be_loaded_but_resumed(
    settings: PipelineSettings, load_store: LoadStore
) -> None:
    gone = TableId("public", "gone")
    load_store.set_hold(gone, LoadHold.PAUSED)
    with pytest.raises(ConfigError, match="no longer has this table"):
        load_requests.request_loads(settings, ["public.gone"])
    assert answer(load_requests.hold_loads(settings, ["public.gone"], None), gone)[0] == "resumed"
    assert load_store.holds() == {}


# ---- conditions


@pytest.mark.parametrize(
    "where",
    [
        "id > 5",
        "status = 'it''s; open' and \"Total\" >= 1.5",
        "id > 5 -- the new ones",
        "id > 5 /* all /* of */ them */",
        "id in (select 1 union select 2)",
        "status = $$a ) b$$ or (id = 1) or not (id = 2)",
        "null",
        "(id, status) > (1, 'x')",
        "status is distinct from '{x}' and status like '%d'",
    ],
)
def test_a_complete_condition_is_accepted(settings: PipelineSettings, load_store: LoadStore, where: str) -> None:
    load_requests.request_loads(settings, ["public.orders"], where=where)
    (request,) = load_store.requests()
    assert request.where == where


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("colour = 'red'", 'column "colour" does not exist'),
        ("id >", "syntax error"),
        ("id = 'abc'", "invalid input syntax for type integer"),
        ("id", "argument of WHERE must be type boolean"),
        ("id > 5; drop table orders", "syntax error"),
        ("true); drop table orders; select (true", "multiple commands"),
        ("true) or (true", "must be one complete expression"),
        ("true) union select 1 from public.orders where (true", "must be one complete expression"),
        ("true] or array[true", "syntax error"),
        ("status = 'open", "unterminated quoted string"),
        ('"Total > 1', "unterminated quoted identifier"),
        ("id > 5 /* and", "unterminated /* comment"),
        ("status = $$open", "unterminated dollar-quoted string"),
        ("true) -- or", "syntax error"),
        ("id > $1", "parameters"),
        ("count(*) > 1", "aggregate functions are not allowed in WHERE"),
        ("id in (select id from customers)", 'relation "customers" does not exist'),
        ("", "it is empty"),
        ("  ", "it is empty"),
        ("status = '\udcff'", "not UTF-8"),
    ],
)
def test_an_invalid_condition_is_refused_with_the_servers_message(
    settings: PipelineSettings, url: str, where: str, words: str
) -> None:
    with pytest.raises(ConfigError) as error:
        load_requests.request_loads(settings, ["public.orders"], where=where)
    assert words in error.value.message
    assert "WHERE" in error.value.hint
    assert "secret value" not in str(error.value)
    assert records(settings) == []
    with psycopg.connect(url) as connection:
        assert connection.execute("select count(*) from orders").fetchone() == (1,)


def test_a_condition_is_checked_for_every_table_before_any_request_is_stored(settings: PipelineSettings) -> None:
    with pytest.raises(ConfigError, match='"status" does not exist') as error:
        load_requests.request_loads(settings, ["public.orders", "public.customers"], where="status = 'open'")
    assert error.value.fields["table"] == CUSTOMERS
    assert records(settings) == []


def test_a_condition_on_a_partitioned_table_is_checked_as_for_its_partitions(
    settings: PipelineSettings, load_store: LoadStore
) -> None:
    load_requests.request_loads(settings, ["public.parts"], where="x > 5")
    assert [request.table for request in load_store.requests()] == [PARTS]
    with pytest.raises(ConfigError):
        load_requests.request_loads(settings, ["public.parts"], where="parts.x > 5")


def test_the_wait_for_a_locked_table_is_short(
    settings: PipelineSettings, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_requests, "LOCK_SECONDS_MAX", 1)
    with psycopg.connect(url) as other:
        other.execute("lock table orders in access exclusive mode")
        with pytest.raises(TailraceError, match="lock"):
            load_requests.request_loads(settings, ["public.orders"], where="id > 5")
    assert records(settings) == []


@pytest.mark.parametrize(("mode", "where"), [(LoadMode.REFRESH, None), (LoadMode.REPLACE, "a > 1")])
def test_a_table_without_a_key_can_only_be_reloaded_as_a_whole(
    settings: PipelineSettings, load_store: LoadStore, mode: LoadMode, where: str | None
) -> None:
    with pytest.raises(ConfigError, match="without a key can only be reloaded as a whole"):
        load_requests.request_loads(settings, ["public.no_key"], mode=mode, where=where)
    assert records(settings) == []
    load_requests.request_loads(settings, ["public.no_key"])
    assert [request.table for request in load_store.requests()] == [NO_KEY]


def test_a_table_that_keeps_every_version_cannot_be_reloaded_in_part(
    settings: PipelineSettings, load_store: LoadStore
) -> None:
    keeping = settings.model_copy(update={"tables": settings.tables.model_copy(update={"mode": "history"})})
    with pytest.raises(Unsupported, match="`mode: history` cannot be reloaded"):
        load_requests.request_loads(keeping, ["public.customers"], where="id > 5")
    assert records(settings) == []
    (answer,) = load_requests.request_loads(keeping, ["public.customers"], mode=LoadMode.REFRESH).tables
    assert "only changed rows" not in answer.said, "it is replaced because its spec differs"


def test_an_unloaded_table_or_one_with_another_schema_cannot_be_reloaded_in_part(
    settings: PipelineSettings, url: str
) -> None:
    with pytest.raises(ConfigError, match="it is not loaded yet"):
        load_requests.request_loads(settings, ["public.never_loaded"], where="id > 5")
    with psycopg.connect(url, autocommit=True) as admin:
        admin.execute("alter table customers add extra int")
        try:
            with pytest.raises(ConfigError, match="its schema differs"):
                load_requests.request_loads(settings, ["public.customers"], where="id > 5")
        finally:
            admin.execute("alter table customers drop extra")
    assert records(settings) == []


# ---- holding


def test_a_paused_load_reports_its_progress_and_continues_when_resumed(
    settings: PipelineSettings, load_store: LoadStore
) -> None:
    begin(settings, load_store, NEVER)
    done, text = answer(load_requests.hold_loads(settings, ["public.never_loaded"], LoadHold.PAUSED), NEVER)
    assert (done, load_store.holds()) == ("paused", {NEVER: LoadHold.PAUSED})
    assert "1 of 1 chunks are done" in text
    assert answer(load_requests.hold_loads(settings, ["public.never_loaded"], LoadHold.PAUSED), NEVER)[0] == "nothing"
    done, text = answer(load_requests.hold_loads(settings, ["public.never_loaded"], None), NEVER)
    assert (done, load_store.holds()) == ("resumed", {})
    assert "continues" in text


def test_without_a_table_a_hold_is_for_all(settings: PipelineSettings, load_store: LoadStore) -> None:
    asked = load_requests.hold_loads(settings, [], LoadHold.PAUSED)
    assert set(load_store.holds()) == {ORDERS, CUSTOMERS, NO_KEY, PARTS, NEVER}
    assert "it is not being loaded" in answer(asked, ORDERS)[1]
    assert answer(asked, NEVER)[1] == "it is not loaded until it is resumed"
    load_requests.hold_loads(settings, [], None)
    assert load_store.holds() == {}
    assert {table.done for table in load_requests.hold_loads(settings, [], None).tables} == {"nothing"}


def test_a_stop_of_a_reload_leaves_the_table_as_it_was(settings: PipelineSettings, load_store: LoadStore) -> None:
    begin(settings, load_store, ORDERS)
    done, text = answer(load_requests.hold_loads(settings, ["public.orders"], LoadHold.STOPPED), ORDERS)
    assert (done, load_store.holds()) == ("stopped", {ORDERS: LoadHold.STOPPED})
    assert "continues as before" in text


def test_a_stop_of_a_first_load_leaves_the_table_unloaded(settings: PipelineSettings, load_store: LoadStore) -> None:
    load_requests.request_loads(settings, ["public.never_loaded"])
    done, text = answer(load_requests.hold_loads(settings, ["public.never_loaded"], LoadHold.STOPPED), NEVER)
    assert (done, load_store.holds(), load_store.requests()) == ("stopped", {NEVER: LoadHold.STOPPED}, [])
    assert "not loaded until a load is requested or resumed" in text


def test_a_stop_without_a_load_sets_no_hold(settings: PipelineSettings, load_store: LoadStore) -> None:
    asked = load_requests.hold_loads(settings, ["public.orders"], LoadHold.STOPPED)
    assert answer(asked, ORDERS) == ("nothing", "it is not being loaded")
    assert load_store.holds() == {}


def test_a_stop_of_all_covers_loads_requests_and_unloaded_tables(
    settings: PipelineSettings, load_store: LoadStore
) -> None:
    begin(settings, load_store, ORDERS)
    load_requests.request_loads(settings, ["public.customers"])
    load_requests.hold_loads(settings, [], LoadHold.STOPPED)
    assert load_store.holds() == dict.fromkeys((ORDERS, CUSTOMERS, NEVER), LoadHold.STOPPED)


def write_status(settings: PipelineSettings, **states: str) -> None:
    """Write the status file of an applying process."""
    path = settings.log.path / STATUS_FILE
    path.parent.mkdir(exist_ok=True)
    tables = [
        {"schema": "public", "table": name, "state": state, "reason": "table-unusable"}
        for name, state in states.items()
    ]
    path.write_text(json.dumps({"tables": tables}))


def test_a_retry_is_requested_for_failed_tables_only(settings: PipelineSettings, load_store: LoadStore) -> None:
    write_status(settings, orders="failed", customers="live", parts="needs_snapshot")
    asked = load_requests.request_retries(settings, ["public.*"])
    assert {table.table: table.done for table in asked.tables} == {
        "orders": "retried",
        "customers": "nothing",
        "parts": "nothing",
        "no_key": "nothing",
        "never_loaded": "nothing",
    }
    answer = {table.table: table.said for table in asked.tables}
    assert answer["orders"] == "it is retried (table-unusable)"
    assert answer["customers"] == "it has not failed: it is live"
    assert "tailrace snapshot" in answer["parts"]
    assert load_store.retry_requests() == [ORDERS]
    load_store.clear_retry(ORDERS)
    assert load_store.retry_requests() == []


def test_without_a_table_all_failed_tables_are_retried(settings: PipelineSettings, load_store: LoadStore) -> None:
    assert load_requests.request_retries(settings, []).tables == ()
    write_status(settings, orders="failed", customers="live", no_key="failed")
    asked = load_requests.request_retries(settings, [])
    assert [table.name for table in asked.tables] == ["public.no_key", "public.orders"]
    assert (asked.action, asked.apply_pid, sorted(load_store.retry_requests())) == ("retry", None, [NO_KEY, ORDERS])


def test_a_retry_of_an_unknown_table_is_refused(settings: PipelineSettings) -> None:
    with pytest.raises(ConfigError, match=r"public\.order"):
        load_requests.request_retries(settings, ["public.order"])
