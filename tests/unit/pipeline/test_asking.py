"""Asking for loads and holding them back: only records are written, and nothing that a load would refuse."""

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
from tailrace.pipeline.config.settings import PipelineSettings, load_settings
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
    """A pipeline whose log is there, and whose tables are loaded but for one."""
    (tmp_path / "tailrace.yaml").write_text(SETTINGS.format(url=url))
    found = load_settings(tmp_path / "tailrace.yaml")
    Diary(tmp_path / "log").close()
    log_id = ChangeLog.open(tmp_path / "log").log_id
    # Publications are made by capture; here every column is told.
    with psycopg.connect(url, autocommit=True) as admin:
        admin.execute(f"drop publication if exists tailrace_{log_id}")
        admin.execute(f"create publication tailrace_{log_id} for all tables with (publish_via_partition_root)")
    with connect(url) as connection:
        for table in (ORDERS, CUSTOMERS, NO_KEY, PARTS):
            shape = Catalogue(connection).describe(table, None)
            lake = DeltaRsTable(table_path(found.tables.path, table), log_id)
            lake.commit_load(shape, [], AppliedPosition(seq=0, commit=0, position=ZERO))
    return found


@pytest.fixture
def silent(settings: PipelineSettings, tmp_path: Path) -> PipelineSettings:
    """The same without a source that answers; of its tables the log knows those of a diary."""
    (tmp_path / "tailrace.yaml").write_text(SETTINGS.format(url="postgresql://app@127.0.0.1:1/shop"))
    return load_settings(tmp_path / "tailrace.yaml")


@pytest.fixture
def seeds(settings: PipelineSettings) -> LoadStore:
    return LoadStore(settings.log.path)


def records(settings: PipelineSettings) -> list[str]:
    return sorted(path.name for path in Path(str(settings.log.path), FOLDER).rglob("*.json"))


def begin(settings: PipelineSettings, seeds: LoadStore, table: TableId, wish: LoadRequest | None = None) -> LoadRecord:
    """A load under way, as an applying process would have left it: one chunk is in."""
    log_id = ChangeLog.open(settings.log.path).log_id
    seed = LoadRecord(
        plan=open_source(settings, log_id).plan(table, ChunkKind.KEY, 1 << 20), snapshot_position=Lsn(1), request=wish
    )
    seeds.begin(seed)
    seeds.record_chunk(seed.id, StagedChunk(chunk=0, files=(), rows=0, bytes=0, seconds=0.1, seen_until=Lsn(1)))
    return seed


def said(asked: load_requests.LoadRequestResult, table: TableId) -> tuple[str, str]:
    """What was done for a table, and how it is told."""
    found = next(item for item in asked.tables if (item.schema, item.table) == (table.schema, table.name))
    return found.done, found.said


# ---- asking


def test_a_wish_is_put_on_record_for_every_table_that_matches(settings: PipelineSettings, seeds: LoadStore) -> None:
    asked = load_requests.request_loads(settings, ["public.orders", "public.cust*"], mode=LoadMode.REFRESH)
    assert {(wish.table, wish.mode, wish.where) for wish in seeds.requests()} == {
        (ORDERS, LoadMode.REFRESH, None),
        (CUSTOMERS, LoadMode.REFRESH, None),
    }
    assert [table.done for table in asked.tables] == ["asked", "asked"]
    assert asked.apply_pid is None


def test_whoever_applies_now_is_named(settings: PipelineSettings) -> None:
    held = LogLease(settings.log.path, APPLIER_LEASE)
    try:
        assert load_requests.request_loads(settings, ["public.orders"]).apply_pid is not None
    finally:
        held.release()


def test_asking_again_replaces_what_was_waiting(settings: PipelineSettings, seeds: LoadStore) -> None:
    load_requests.request_loads(settings, ["public.orders"], where="id > 5")
    asked = load_requests.request_loads(settings, ["public.orders"])
    (wish,) = seeds.requests()
    assert wish.where is None
    done, text = said(asked, ORDERS)
    assert done == "replaced"
    assert "replaces what was asked for before" in text


def test_asking_during_a_load_lets_that_one_land_first(settings: PipelineSettings, seeds: LoadStore) -> None:
    under_way = LoadRequest(table=ORDERS, where="id > 5")
    seeds.add_request(under_way)
    begin(settings, seeds, ORDERS, under_way)
    done, text = said(load_requests.request_loads(settings, ["public.orders"]), ORDERS)
    assert done == "asked"
    assert "begins when the load that is under way has landed" in text
    assert under_way in seeds.requests(), "should it come to nothing, it is still wished for"
    assert len(seeds.requests()) == 2


def test_asking_for_a_stopped_table_lifts_the_hold_and_a_paused_one_waits(
    settings: PipelineSettings, seeds: LoadStore
) -> None:
    seeds.set_hold(ORDERS, LoadHold.STOPPED)
    seeds.set_hold(CUSTOMERS, LoadHold.PAUSED)
    asked = load_requests.request_loads(settings, ["public.orders", "public.customers"])
    assert seeds.holds() == {CUSTOMERS: LoadHold.PAUSED}
    assert "paused: `--resume`" in said(asked, CUSTOMERS)[1]


def test_a_table_that_was_never_loaded_can_be_asked_for(settings: PipelineSettings, seeds: LoadStore) -> None:
    load_requests.request_loads(settings, ["public.never_loaded"])
    assert [wish.table for wish in seeds.requests()] == [NEVER]


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("public.order", "Did you mean public.orders?"),
        ("orders", "Did you mean public.orders?"),
        ("sales.orders", "Did you mean public.orders?"),
        ("public.audit", "`source.exclude`"),
        ("sales.*", "`tailrace status FILE` lists"),
        ("public.[", "`tailrace status FILE` lists"),
        ("", "`tailrace status FILE` lists"),
    ],
)
def test_a_name_that_matches_nothing_is_an_error_with_close_names(
    settings: PipelineSettings, pattern: str, hint: str
) -> None:
    with pytest.raises(ConfigError, match="matches no table") as error:
        load_requests.request_loads(settings, ["public.customers", pattern])
    assert hint in error.value.hint
    assert records(settings) == [], "nothing is asked if anything is wrong"


def test_no_table_at_all_is_an_error(settings: PipelineSettings) -> None:
    with pytest.raises(ConfigError, match="is not said"):
        load_requests.request_loads(settings, [])


def test_without_a_log_there_is_nothing_to_ask(settings: PipelineSettings, tmp_path: Path) -> None:
    elsewhere = settings.model_copy(update={"log": settings.log.model_copy(update={"path": tmp_path / "other"})})
    with pytest.raises(LogUnusable, match="there is no log here"):
        load_requests.request_loads(elsewhere, ["public.orders"])
    with pytest.raises(LogUnusable, match="there is no log here"):
        load_requests.hold_loads(elsewhere, [], LoadHold.PAUSED)
    assert not (tmp_path / "other").exists()


def test_a_source_that_does_not_answer_leaves_what_the_log_knows(silent: PipelineSettings) -> None:
    seeds = LoadStore(silent.log.path)
    seeds.set_hold(ORDERS, LoadHold.STOPPED)
    asked = load_requests.request_loads(silent, ["public.orders"])
    assert [wish.table for wish in seeds.requests()] == [ORDERS]
    assert asked.note is not None
    assert "the source was not asked" in asked.note
    with pytest.raises(SourceUnreachable):
        load_requests.request_loads(silent, ["public.orders"], where="id > 5")


def test_a_table_that_is_gone_at_the_source_cannot_be_loaded_but_let_go(
    settings: PipelineSettings, seeds: LoadStore
) -> None:
    gone = TableId("public", "gone")
    seeds.set_hold(gone, LoadHold.PAUSED)
    with pytest.raises(ConfigError, match="does not have this table any more"):
        load_requests.request_loads(settings, ["public.gone"])
    assert said(load_requests.hold_loads(settings, ["public.gone"], None), gone)[0] == "resumed"
    assert seeds.holds() == {}


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
def test_a_condition_that_stands_by_itself_is_asked_for(
    settings: PipelineSettings, seeds: LoadStore, where: str
) -> None:
    load_requests.request_loads(settings, ["public.orders"], where=where)
    (wish,) = seeds.requests()
    assert wish.where == where


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
def test_a_condition_that_makes_no_sense_is_refused_in_the_server_s_words(
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


def test_a_condition_is_looked_at_for_every_table_before_anything_is_asked(settings: PipelineSettings) -> None:
    with pytest.raises(ConfigError, match='"status" does not exist') as error:
        load_requests.request_loads(settings, ["public.orders", "public.customers"], where="status = 'open'")
    assert error.value.fields["table"] == CUSTOMERS
    assert records(settings) == []


def test_a_condition_on_a_partitioned_table_is_read_as_its_partitions_are(
    settings: PipelineSettings, seeds: LoadStore
) -> None:
    load_requests.request_loads(settings, ["public.parts"], where="x > 5")
    assert [wish.table for wish in seeds.requests()] == [PARTS]
    with pytest.raises(ConfigError):
        load_requests.request_loads(settings, ["public.parts"], where="parts.x > 5")


def test_a_table_that_somebody_holds_locked_is_not_waited_for_long(
    settings: PipelineSettings, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_requests, "LOCK_SECONDS_MAX", 1)
    with psycopg.connect(url) as other:
        other.execute("lock table orders in access exclusive mode")
        with pytest.raises(TailraceError, match="lock"):
            load_requests.request_loads(settings, ["public.orders"], where="id > 5")
    assert records(settings) == []


@pytest.mark.parametrize(("mode", "where"), [(LoadMode.REFRESH, None), (LoadMode.REPLACE, "a > 1")])
def test_a_table_without_a_key_can_only_be_replaced_as_a_whole(
    settings: PipelineSettings, seeds: LoadStore, mode: LoadMode, where: str | None
) -> None:
    with pytest.raises(ConfigError, match="without a key can only be replaced as a whole"):
        load_requests.request_loads(settings, ["public.no_key"], mode=mode, where=where)
    assert records(settings) == []
    load_requests.request_loads(settings, ["public.no_key"])
    assert [wish.table for wish in seeds.requests()] == [NO_KEY]


def test_no_part_can_be_read_again_of_a_table_that_keeps_every_version(
    settings: PipelineSettings, seeds: LoadStore
) -> None:
    keeping = settings.model_copy(update={"tables": settings.tables.model_copy(update={"mode": "history"})})
    with pytest.raises(Unsupported, match="`mode: history` cannot be reloaded"):
        load_requests.request_loads(keeping, ["public.customers"], where="id > 5")
    assert records(settings) == []
    (told,) = load_requests.request_loads(keeping, ["public.customers"], mode=LoadMode.REFRESH).tables
    assert "only what differs" not in told.said, "it is made anew in another form"


def test_no_part_can_be_read_again_of_what_is_not_loaded_or_has_another_shape(
    settings: PipelineSettings, url: str
) -> None:
    with pytest.raises(ConfigError, match="it is not loaded yet"):
        load_requests.request_loads(settings, ["public.never_loaded"], where="id > 5")
    with psycopg.connect(url, autocommit=True) as admin:
        admin.execute("alter table customers add extra int")
        try:
            with pytest.raises(ConfigError, match="another shape"):
                load_requests.request_loads(settings, ["public.customers"], where="id > 5")
        finally:
            admin.execute("alter table customers drop extra")
    assert records(settings) == []


# ---- holding


def test_a_load_that_is_paused_says_how_far_it_is_and_goes_on_when_resumed(
    settings: PipelineSettings, seeds: LoadStore
) -> None:
    begin(settings, seeds, NEVER)
    done, text = said(load_requests.hold_loads(settings, ["public.never_loaded"], LoadHold.PAUSED), NEVER)
    assert (done, seeds.holds()) == ("paused", {NEVER: LoadHold.PAUSED})
    assert "1 of 1 chunks are in" in text
    assert said(load_requests.hold_loads(settings, ["public.never_loaded"], LoadHold.PAUSED), NEVER)[0] == "nothing"
    done, text = said(load_requests.hold_loads(settings, ["public.never_loaded"], None), NEVER)
    assert (done, seeds.holds()) == ("resumed", {})
    assert "goes on" in text


def test_without_a_table_all_of_them_are_meant(settings: PipelineSettings, seeds: LoadStore) -> None:
    asked = load_requests.hold_loads(settings, [], LoadHold.PAUSED)
    assert set(seeds.holds()) == {ORDERS, CUSTOMERS, NO_KEY, PARTS, NEVER}
    assert "nothing of it is being loaded" in said(asked, ORDERS)[1]
    assert said(asked, NEVER)[1] == "it is not loaded until it is resumed"
    load_requests.hold_loads(settings, [], None)
    assert seeds.holds() == {}
    assert {table.done for table in load_requests.hold_loads(settings, [], None).tables} == {"nothing"}


def test_a_stop_of_a_reload_leaves_the_table_as_it_was(settings: PipelineSettings, seeds: LoadStore) -> None:
    begin(settings, seeds, ORDERS)
    done, text = said(load_requests.hold_loads(settings, ["public.orders"], LoadHold.STOPPED), ORDERS)
    assert (done, seeds.holds()) == ("stopped", {ORDERS: LoadHold.STOPPED})
    assert "goes on as it was" in text


def test_a_stop_of_a_first_load_leaves_the_table_unloaded(settings: PipelineSettings, seeds: LoadStore) -> None:
    load_requests.request_loads(settings, ["public.never_loaded"])
    done, text = said(load_requests.hold_loads(settings, ["public.never_loaded"], LoadHold.STOPPED), NEVER)
    assert (done, seeds.holds(), seeds.requests()) == ("stopped", {NEVER: LoadHold.STOPPED}, [])
    assert "not loaded until it is asked for, or resumed" in text


def test_a_stop_where_nothing_is_loaded_holds_nothing_back(settings: PipelineSettings, seeds: LoadStore) -> None:
    asked = load_requests.hold_loads(settings, ["public.orders"], LoadHold.STOPPED)
    assert said(asked, ORDERS) == ("nothing", "nothing of it is being loaded")
    assert seeds.holds() == {}


def test_a_stop_of_all_reaches_loads_wishes_and_tables_that_are_not_loaded(
    settings: PipelineSettings, seeds: LoadStore
) -> None:
    begin(settings, seeds, ORDERS)
    load_requests.request_loads(settings, ["public.customers"])
    load_requests.hold_loads(settings, [], LoadHold.STOPPED)
    assert seeds.holds() == dict.fromkeys((ORDERS, CUSTOMERS, NEVER), LoadHold.STOPPED)


def noted(settings: PipelineSettings, **states: str) -> None:
    """What a process that applies has left."""
    path = settings.log.path / STATUS_FILE
    path.parent.mkdir(exist_ok=True)
    tables = [
        {"schema": "public", "table": name, "state": state, "reason": "table-unusable"}
        for name, state in states.items()
    ]
    path.write_text(json.dumps({"tables": tables}))


def test_tables_that_have_failed_are_asked_to_be_tried_again(settings: PipelineSettings, seeds: LoadStore) -> None:
    noted(settings, orders="failed", customers="live", parts="needs_snapshot")
    asked = load_requests.request_retries(settings, ["public.*"])
    assert {table.table: table.done for table in asked.tables} == {
        "orders": "retried",
        "customers": "nothing",
        "parts": "nothing",
        "no_key": "nothing",
        "never_loaded": "nothing",
    }
    said = {table.table: table.said for table in asked.tables}
    assert said["orders"] == "it is tried again (table-unusable)"
    assert said["customers"] == "it has not failed: it is live"
    assert "tailrace snapshot" in said["parts"]
    assert seeds.retry_requests() == [ORDERS]
    seeds.clear_retry(ORDERS)
    assert seeds.retry_requests() == []


def test_without_a_table_all_that_have_failed_are_tried_again(settings: PipelineSettings, seeds: LoadStore) -> None:
    assert load_requests.request_retries(settings, []).tables == ()
    noted(settings, orders="failed", customers="live", no_key="failed")
    asked = load_requests.request_retries(settings, [])
    assert [table.name for table in asked.tables] == ["public.no_key", "public.orders"]
    assert (asked.action, asked.apply_pid, sorted(seeds.retry_requests())) == ("retry", None, [NO_KEY, ORDERS])


def test_a_table_that_nobody_knows_is_not_tried_again(settings: PipelineSettings) -> None:
    with pytest.raises(ConfigError, match=r"public\.order"):
        load_requests.request_retries(settings, ["public.order"])
