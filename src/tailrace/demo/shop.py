"""A small shop that is always busy: its rows, and its workload.

What must stay true:

- Every kind of transaction in `OPERATIONS` happens in any run longer than a few seconds. Together they are the cases
  that the demo's verdict covers: two quick updates of one row, large values left unchanged, keys that move (once,
  twice, or swapped), and rollbacks.
- Large values are stored EXTERNAL and are longer than the TOAST threshold, so an update that does not touch them
  arrives without them.
- The same seed gives the same transactions: the server's clock and its random numbers are never used.
- The workload is the only writer of these tables, so it knows the keys in use without a query.

Its tables and their first rows are in `shop_tables.py`.
"""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, timedelta
from types import TracebackType
from typing import Self

import psycopg
from psycopg import sql
from psycopg.rows import TupleRow
from psycopg.types.json import Jsonb

from tailrace.demo.shop_tables import Connection

LARGE_BYTES_MIN = 4_000
STOP_SECONDS_MAX = 30.0
BEHIND_SECONDS_MAX = 1.0


class Workload:
    """Runs a steady mix of transactions in its own thread, until `stop()` or `operations_max`.

    An error ends the thread; `stop()` raises it, and `failed` shows it earlier.
    """

    def __init__(
        self,
        url: str,
        *,
        transactions_per_second: float = 200.0,
        random_seed: int = 7,
        operations_max: int | None = None,
    ) -> None:
        if transactions_per_second <= 0:
            raise ValueError("transactions_per_second must be above zero")
        self.counts: Counter[str] = Counter()
        """Count of runs to the end, by kind. The rollback kinds end undone, as they should."""
        self._url = url
        self._interval = 1.0 / transactions_per_second
        self._random_seed = random_seed
        self._operations_max = operations_max
        self._stopping = threading.Event()
        self._error: Exception | None = None
        self._connection: Connection | None = None
        self._thread = threading.Thread(target=self._run, name="shop-workload", daemon=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(raise_error=error is None)

    @property
    def failed(self) -> Exception | None:
        return self._error

    @property
    def operations(self) -> int:
        """Number of runs to the end; a few of them are two short transactions."""
        return sum(self.counts.values())

    def start(self) -> Self:
        self._thread.start()
        return self

    def stop(self, *, raise_error: bool = True) -> None:
        """Finish the transaction under way and end. Safe to call twice, and before `start()`."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(STOP_SECONDS_MAX)
        if self._thread.is_alive():
            connection = self._connection
            if connection is not None:
                connection.cancel_safe(timeout=5.0)  # it waits for a lock, most likely
            self._thread.join(STOP_SECONDS_MAX)
        if self._thread.is_alive():
            raise RuntimeError("the shop's workload does not stop")
        if raise_error and self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            with psycopg.connect(self._url, autocommit=True, connect_timeout=10) as connection:
                self._connection = connection
                connection.execute("SET application_name = 'tailrace shop workload'")
                self._work(Shop(connection, random.Random(self._random_seed)))
        except Exception as error:  # the thread's boundary: stop() raises it in the caller's
            self._error = error
        finally:
            self._connection = None

    def _work(self, shop: Shop) -> None:
        kinds, weights = tuple(OPERATIONS), [weight for weight, _ in OPERATIONS.values()]
        due = time.monotonic()
        # Each kind once before chance takes over, so that even a short run has them all.
        upcoming = list(reversed(kinds))
        while not self._stopping.wait(max(0.0, due - time.monotonic())):
            kind = upcoming.pop() if upcoming else shop.random.choices(kinds, weights)[0]
            OPERATIONS[kind][1](shop)
            self.counts[kind] += 1
            if self.operations == self._operations_max:
                return
            # Transactions missed in a slow moment are not made up for in a burst.
            due = max(due + self._interval, time.monotonic() - BEHIND_SECONDS_MAX)


class KeyPool:
    """The keys in use of one table. A draw, an addition and a removal each cost the same at any size."""

    def __init__(self, keys: list[int] | list[str]) -> None:
        self._keys: list[int | str] = list(keys)
        self._places = {key: place for place, key in enumerate(self._keys)}

    def __len__(self) -> int:
        return len(self._keys)

    def draw(self, chance: random.Random) -> int | str:
        return self._keys[chance.randrange(len(self._keys))]

    def draw_two(self, chance: random.Random) -> tuple[int | str, int | str]:
        first, second = chance.sample(range(len(self._keys)), 2)
        return self._keys[first], self._keys[second]

    def add(self, key: int | str) -> None:
        self._places[key] = len(self._keys)
        self._keys.append(key)

    def remove(self, key: int | str) -> None:
        place, last = self._places.pop(key), self._keys.pop()
        if last != key:
            self._keys[place] = last
            self._places[last] = place


class Shop:
    """State of the workload: connection, keys in use, next free number, and its own clock."""

    def __init__(self, connection: Connection, chance: random.Random) -> None:
        self.connection = connection
        self.random = chance
        self.customers = self._keys_of("customers", "id")
        self.products = self._keys_of("products", "sku")
        self.orders = self._keys_of("orders", "id")
        if min(len(self.customers), len(self.products), len(self.orders)) < 2:
            raise ValueError("the shop is empty: call load_first_rows() first")
        query = "SELECT GREATEST((SELECT max(id) FROM customers), (SELECT max(id) FROM orders))"
        row = self.run(query).fetchone()
        assert row is not None
        # A later run of the same workload must not meet the keys of an earlier one.
        self._number = int(row[0]) + 1_000_000
        self._now = datetime(2026, 1, 1, tzinfo=UTC)

    def _keys_of(self, table: str, key: str) -> KeyPool:
        query = sql.SQL("SELECT {key} FROM {table} ORDER BY 1").format(
            key=sql.Identifier(key), table=sql.Identifier(table)
        )
        return KeyPool([row[0] for row in self.connection.execute(query)])

    def run(self, query: str, *values: object) -> psycopg.Cursor[TupleRow]:
        # The queries are this module's own constants; psycopg asks for a literal to keep user input out.
        return self.connection.execute(query.encode(), values)

    def new_number(self) -> int:
        self._number += 1
        return self._number

    def new_sku(self) -> str:
        return f"SKU-N{self.new_number()}"

    def now(self) -> datetime:
        self._now += timedelta(microseconds=self.random.randrange(1, 5_000_000))
        return self._now

    def day(self) -> date:
        return date(2026, 1, 1) + timedelta(days=self.random.randrange(-20_000, 3_000))

    def large_text(self) -> str:
        piece = f"{self.random.getrandbits(64):016x} naïve €\n"
        return piece * (1 + (LARGE_BYTES_MIN + self.random.randrange(4_000)) // len(piece))

    def amount(self) -> str:
        return f"{self.random.randrange(-10_000, 1_000_000) / 100:.2f}"


# --- single steps ------------------------------------------------------------------------------------------


def _add_customer(shop: Shop, key: int) -> None:
    chance = shop.random
    tags = chance.choice([None, [], ["new"], ["a,b", None, 'say "hi"', "back\\slash", ""]])
    notes = chance.choice([None, "", shop.large_text(), shop.large_text()])
    shop.run(
        "INSERT INTO customers VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)",
        key,
        uuid.UUID(int=shop.new_number() << 64),
        f"Customer {key}",
        chance.choice([None, f"c{key}@example.org"]),
        chance.random() < 0.9,
        chance.choice([None, shop.day()]),
        shop.amount(),
        tags,
        Jsonb({"level": chance.randrange(9), "note": None}),
        notes,
        shop.now(),
    )


def _add_product(shop: Shop, key: str) -> None:
    chance = shop.random
    image = chance.choice([None, b"", chance.randbytes(40), chance.randbytes(3_000)])
    weight = chance.choice([None, float("nan"), 0.0, -0.0, chance.random() * 10, 1e-300])
    sizes = chance.choice([None, [], [1, None, 3], [chance.randrange(-99, 99)]])
    shop.run(
        "INSERT INTO products VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s)",
        key,
        f"Product\t{key}",
        shop.amount(),
        weight,
        chance.randrange(500),
        sizes,
        image,
        shop.large_text(),
        chance.choice([None, True, False]),
        shop.now().replace(tzinfo=None),
    )


def _add_order(shop: Shop, key: int, customer: int | str) -> None:
    chance = shop.random
    details = chance.choice([None, Jsonb({"gift": True}), Jsonb([1, None, "x"])])
    message = shop.large_text() if chance.random() < 0.3 else None
    shop.run(
        "INSERT INTO orders VALUES (%s, %s, 'new', %s, %s, 0, %s, %s)",
        key,
        customer,
        shop.now(),
        chance.choice([None, shop.day()]),
        details,
        message,
    )


def _add_item(shop: Shop, order: int | str, line: int) -> None:
    chance = shop.random
    shop.run(
        "INSERT INTO order_items VALUES (%s, %s, %s, %s, %s, %s, %s)",
        order,
        line,
        shop.products.draw(chance),
        chance.randrange(1, 9),
        shop.amount(),
        chance.choice([None, 0.1, 0.25]),
        chance.random() < 0.1,
    )


def _move_customer(shop: Shop, old: int | str, new: int) -> None:
    shop.run("UPDATE customers SET id = %s WHERE id = %s", new, old)


def _move_product(shop: Shop, old: int | str, new: int | str) -> None:
    shop.run("UPDATE products SET sku = %s WHERE sku = %s", new, old)


# --- kinds of transaction ----------------------------------------------------------------------------------


def insert_customer(shop: Shop) -> None:
    key = shop.new_number()
    _add_customer(shop, key)
    shop.customers.add(key)


def insert_product(shop: Shop) -> None:
    key = shop.new_sku()
    _add_product(shop, key)
    shop.products.add(key)


def place_order(shop: Shop) -> None:
    """Change four tables in one transaction: the order, its items, the stock, the customer's credit."""
    key, customer = shop.new_number(), shop.customers.draw(shop.random)
    with shop.connection.transaction():
        _add_order(shop, key, customer)
        for line in range(1, shop.random.randrange(2, 5)):
            _add_item(shop, key, line)
        shop.run(
            "UPDATE products p SET stock = stock - 1 FROM order_items i WHERE i.sku = p.sku AND i.order_id = %s", key
        )
        shop.run("UPDATE customers SET credit = credit - 1.25 WHERE id = %s", customer)
    shop.orders.add(key)


def update_beside_large_value(shop: Shop) -> None:
    shop.run(
        "UPDATE customers SET active = NOT active, profile = profile || %s WHERE id = %s",
        Jsonb({"seen": shop.random.randrange(1000)}),
        shop.customers.draw(shop.random),
    )
    shop.run(
        "UPDATE products SET price = price + 0.01, updated_at = %s WHERE sku = %s",
        shop.now().replace(tzinfo=None),
        shop.products.draw(shop.random),
    )


def update_large_value(shop: Shop) -> None:
    text = shop.large_text() if shop.random.random() < 0.8 else None
    shop.run("UPDATE customers SET notes = %s WHERE id = %s", text, shop.customers.draw(shop.random))


def update_twice(shop: Shop) -> None:
    key = shop.products.draw(shop.random)
    with shop.connection.transaction():
        shop.run("UPDATE products SET stock = stock + 5 WHERE sku = %s", key)
        shop.run("UPDATE products SET available = NOT available, stock = stock - 3 WHERE sku = %s", key)


def advance_order(shop: Shop) -> None:
    status = shop.random.choice(["paid", "packed", "sent", "returned", "on hold"])
    shop.run(
        "UPDATE orders SET status = %s, total = total + 1.0001 WHERE id = %s", status, shop.orders.draw(shop.random)
    )


def delete_order(shop: Shop) -> None:
    """Delete an order; its items are deleted too, by the foreign key."""
    if len(shop.orders) > 10:
        key = shop.orders.draw(shop.random)
        shop.run("DELETE FROM orders WHERE id = %s", key)
        shop.orders.remove(key)


def delete_customer(shop: Shop) -> None:
    if len(shop.customers) > 10:
        key = shop.customers.draw(shop.random)
        with shop.connection.transaction():
            gone = shop.run("DELETE FROM orders WHERE customer_id = %s RETURNING id", key).fetchall()
            shop.run("DELETE FROM customers WHERE id = %s", key)
        shop.customers.remove(key)
        for (order,) in gone:
            shop.orders.remove(order)


def delete_product(shop: Shop) -> None:
    if len(shop.products) > 10:
        key = shop.products.draw(shop.random)
        with shop.connection.transaction():
            shop.run("DELETE FROM order_items WHERE sku = %s", key)
            shop.run("DELETE FROM products WHERE sku = %s", key)
        shop.products.remove(key)


def insert_update_delete(shop: Shop) -> None:
    key = shop.new_number()
    with shop.connection.transaction():
        _add_customer(shop, key)
        shop.run("UPDATE customers SET name = 'Nobody' WHERE id = %s", key)
        shop.run("DELETE FROM customers WHERE id = %s", key)


def insert_then_update(shop: Shop) -> None:
    """The update arrives without the large value that the insert had a moment before."""
    key = shop.new_sku()
    with shop.connection.transaction():
        _add_product(shop, key)
        shop.run("UPDATE products SET stock = 1 WHERE sku = %s", key)
    shop.products.add(key)


def replace_row(shop: Shop) -> None:
    """Delete a row and insert it again under the same key, in one transaction."""
    key = shop.new_number()
    with shop.connection.transaction():
        _add_customer(shop, key)
    with shop.connection.transaction():
        shop.run("DELETE FROM customers WHERE id = %s", key)
        _add_customer(shop, key)
    shop.customers.add(key)


def move_customer_key(shop: Shop) -> None:
    """Change a customer's key; the customer's orders follow by the foreign key."""
    old, new = shop.customers.draw(shop.random), shop.new_number()
    _move_customer(shop, old, new)
    shop.customers.remove(old)
    shop.customers.add(new)


def move_customer_key_twice(shop: Shop) -> None:
    old, between, new = shop.customers.draw(shop.random), shop.new_number(), shop.new_number()
    with shop.connection.transaction():
        _move_customer(shop, old, between)
        shop.run("UPDATE customers SET credit = credit + 0.5 WHERE id = %s", between)
        _move_customer(shop, between, new)
    shop.customers.remove(old)
    shop.customers.add(new)


def move_product_key(shop: Shop) -> None:
    old, new = shop.products.draw(shop.random), shop.new_sku()
    _move_product(shop, old, new)
    shop.products.remove(old)
    shop.products.add(new)


def move_product_key_twice(shop: Shop) -> None:
    old, between, new = shop.products.draw(shop.random), shop.new_sku(), shop.new_sku()
    with shop.connection.transaction():
        _move_product(shop, old, between)
        _move_product(shop, between, new)
    shop.products.remove(old)
    shop.products.add(new)


def swap_product_keys(shop: Shop) -> None:
    """Swap the keys of two rows with large values."""
    one, other = shop.products.draw_two(shop.random)
    between = shop.new_sku()
    with shop.connection.transaction():
        _move_product(shop, one, between)
        _move_product(shop, other, one)
        _move_product(shop, between, other)


def move_order_key(shop: Shop) -> None:
    """Change an order's key. Half of the items' own key changes too, by the foreign key."""
    old, new = shop.orders.draw(shop.random), shop.new_number()
    shop.run("UPDATE orders SET id = %s WHERE id = %s", new, old)
    shop.orders.remove(old)
    shop.orders.add(new)


def roll_back(shop: Shop) -> None:
    with shop.connection.transaction(force_rollback=True):
        _add_customer(shop, shop.new_number())
        shop.run("UPDATE products SET stock = -1 WHERE sku = %s", shop.products.draw(shop.random))
        shop.run("DELETE FROM order_items WHERE order_id = %s", shop.orders.draw(shop.random))


def roll_back_to_savepoint(shop: Shop) -> None:
    key = shop.customers.draw(shop.random)
    with shop.connection.transaction():
        shop.run("UPDATE customers SET credit = credit + 10 WHERE id = %s", key)
        with shop.connection.transaction(force_rollback=True):
            shop.run("UPDATE customers SET notes = 'undone' WHERE id = %s", key)
            _add_product(shop, shop.new_sku())
        shop.run("UPDATE customers SET active = true WHERE id = %s", key)


OPERATIONS: Mapping[str, tuple[int, Callable[[Shop], None]]] = {
    "insert_customer": (6, insert_customer),
    "insert_product": (5, insert_product),
    "place_order": (16, place_order),
    "update_beside_large_value": (18, update_beside_large_value),
    "update_large_value": (6, update_large_value),
    "update_twice": (8, update_twice),
    "advance_order": (12, advance_order),
    "delete_order": (8, delete_order),
    "delete_customer": (3, delete_customer),
    "delete_product": (3, delete_product),
    "insert_update_delete": (3, insert_update_delete),
    "insert_then_update": (3, insert_then_update),
    "replace_row": (2, replace_row),
    "move_customer_key": (4, move_customer_key),
    "move_customer_key_twice": (3, move_customer_key_twice),
    "move_product_key": (4, move_product_key),
    "move_product_key_twice": (3, move_product_key_twice),
    "swap_product_keys": (3, swap_product_keys),
    "move_order_key": (3, move_order_key),
    "roll_back": (4, roll_back),
    "roll_back_to_savepoint": (3, roll_back_to_savepoint),
}
"""Every kind of transaction with its weight among the others."""
