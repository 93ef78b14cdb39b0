"""The demo's shop: its workload does everything it says, and what it says can be repeated."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

import psycopg
import pytest
from psycopg.rows import TupleRow

from tailrace.demo.server import EmbeddedPostgres
from tailrace.demo.shop import LARGE_BYTES_MIN, OPERATIONS, Workload
from tailrace.demo.shop_tables import SCHEMA_SQL, TABLES, load_first_rows

Connection = psycopg.Connection[TupleRow]
SETTLE_SECONDS_MAX = 240.0


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(settings={"fsync": "off"}) as running:
        yield running


@pytest.fixture
def shop(server: EmbeddedPostgres) -> Iterator[Connection]:
    with server.connect() as connection:
        connection.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
        connection.execute(SCHEMA_SQL)
        load_first_rows(connection, scale=0.2)
        yield connection


def rows(connection: Connection, query: str) -> list[TupleRow]:
    return connection.execute(query.encode()).fetchall()


def run_until(workload: Workload, operations: int) -> None:
    deadline = time.monotonic() + SETTLE_SECONDS_MAX
    with workload:
        while workload.operations < operations and workload.failed is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_every_kind_of_transaction_happens(server: EmbeddedPostgres, shop: Connection) -> None:
    workload = Workload(server.url(), transactions_per_second=400)
    run_until(workload, 2 * len(OPERATIONS))
    assert {kind for kind, count in workload.counts.items() if count > 0} == set(OPERATIONS)


def test_what_it_does_is_seen_in_the_servers_log_of_changes(server: EmbeddedPostgres, shop: Connection) -> None:
    shop.execute("CREATE PUBLICATION p FOR TABLES IN SCHEMA public")
    shop.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
    try:
        run_until(Workload(server.url(), transactions_per_second=400), 200)
        seen = Counter(changes_seen(shop))
    finally:
        shop.execute("SELECT pg_drop_replication_slot('s')")
    tables = {"customers", "products", "orders", "order_items"}
    assert {(table, verb) for table, verb, *_ in seen} == {(t, v) for t in tables for v in "IUD"}
    moved = {table for table, verb, key_moved, _ in seen if key_moved}
    without_large_value = {table for table, verb, _, unsent in seen if unsent}
    moved_without = {table for table, verb, key_moved, unsent in seen if key_moved and unsent}
    assert moved == tables
    assert without_large_value == moved_without == tables - {"order_items"}


def changes_seen(connection: Connection) -> Iterator[tuple[str, str, bool, bool]]:
    """Of each change: its table, its letter, whether the key moved, whether a value was not sent.

    https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html
    """
    names: dict[bytes, str] = {}
    options = "'proto_version', '1', 'publication_names', 'p'"
    for (message,) in rows(
        connection, f"SELECT data FROM pg_logical_slot_get_binary_changes('s', NULL, NULL, {options})"
    ):
        verb, relation, rest = chr(message[0]), message[1:5], message[5:]
        if verb == "R":
            names[relation] = rest.split(b"\0")[1].decode()
        elif verb == "U" and rest[:1] == b"K":
            _, after = unsent_and_rest(rest[1:])
            yield names[relation], verb, True, unsent_and_rest(after[1:])[0]
        elif verb in "IUD":
            yield names[relation], verb, False, unsent_and_rest(rest[1:])[0]


def unsent_and_rest(tuple_data: bytes) -> tuple[bool, bytes]:
    count, at, unsent = int.from_bytes(tuple_data[:2], "big"), 2, False
    for _ in range(count):
        kind, at = tuple_data[at : at + 1], at + 1
        unsent = unsent or kind == b"u"
        if kind == b"t":
            at += 4 + int.from_bytes(tuple_data[at : at + 4], "big")
    return unsent, tuple_data[at:]


def test_what_is_rolled_back_leaves_no_trace(server: EmbeddedPostgres, shop: Connection) -> None:
    run_until(Workload(server.url(), transactions_per_second=1000), 200)
    assert rows(shop, "SELECT 1 FROM customers WHERE notes = 'undone'") == []
    assert rows(shop, "SELECT 1 FROM customers WHERE name = 'Nobody'") == []


def test_the_large_values_are_out_of_line(shop: Connection) -> None:
    for table in ("customers", "products", "orders"):
        ((size,),) = rows(shop, f"SELECT pg_relation_size(reltoastrelid) FROM pg_class WHERE oid = '{table}'::regclass")
        assert size > 10 * LARGE_BYTES_MIN


def test_the_first_rows_are_a_few_thousand(server: EmbeddedPostgres, shop: Connection) -> None:
    names = ", ".join(f"{schema}.{table}" for schema, table in TABLES)
    shop.execute(f"TRUNCATE {names}".encode())
    load_first_rows(shop)
    counts = {table: rows(shop, f"SELECT count(*) FROM {schema}.{table}")[0][0] for schema, table in TABLES}
    assert counts == {"customers": 1000, "products": 400, "orders": 2000, "order_items": 4000}


def test_the_rate_is_held(server: EmbeddedPostgres, shop: Connection) -> None:
    began = time.monotonic()
    run_until(Workload(server.url(), transactions_per_second=50), 40)
    assert time.monotonic() - began > 39 / 50, "no more than that, however quick the machine is"


def test_the_same_seed_gives_the_same_rows(server: EmbeddedPostgres, shop: Connection) -> None:
    def after_a_run() -> list[list[TupleRow]]:
        shop.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
        shop.execute(SCHEMA_SQL)
        load_first_rows(shop, scale=0.1)
        workload = Workload(server.url(), transactions_per_second=2000, random_seed=3, operations_max=200)
        run_until(workload, 200)
        return [rows(shop, f"SELECT t::text FROM {schema}.{table} t ORDER BY 1") for schema, table in TABLES]

    assert after_a_run() == after_a_run()


def test_a_second_run_meets_nothing_of_the_first(server: EmbeddedPostgres, shop: Connection) -> None:
    for _ in range(2):
        run_until(Workload(server.url(), transactions_per_second=1000), 100)


def test_an_error_ends_it_and_is_raised_by_stop(server: EmbeddedPostgres, shop: Connection) -> None:
    workload = Workload(server.url(), transactions_per_second=400).start()
    # Dropped, it would take locks on the tables it refers to as well, and the two could wait for each other.
    shop.execute("ALTER TABLE order_items RENAME TO elsewhere")
    deadline = time.monotonic() + SETTLE_SECONDS_MAX
    while workload.failed is None and time.monotonic() < deadline:
        time.sleep(0.02)
    with pytest.raises(psycopg.errors.UndefinedTable):
        workload.stop()


def test_an_empty_shop_is_said_to_be_empty(server: EmbeddedPostgres, shop: Connection) -> None:
    shop.execute("TRUNCATE customers, products, orders, order_items")
    with pytest.raises(ValueError, match="load_first_rows"):
        run_until(Workload(server.url()), 1)


def test_stopping_it_before_it_began_or_twice_is_fine(server: EmbeddedPostgres, shop: Connection) -> None:
    Workload(server.url()).stop()
    workload = Workload(server.url()).start()
    workload.stop()
    workload.stop()
    query = "SELECT FROM pg_stat_activity WHERE application_name = 'tailrace shop workload'"
    deadline = time.monotonic() + SETTLE_SECONDS_MAX  # the server ends a session after its client has left
    while left := rows(shop, query):
        assert time.monotonic() < deadline, f"{len(left)} connections are still open"
        time.sleep(0.05)
