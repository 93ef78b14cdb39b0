"""A pipeline whose tables Spark's connector writes, in every mode, against an account that knows no Tailrace."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
from deltalake import DeltaTable

from tailrace.capture.postgres.snapshot import SnapshotReader
from tailrace.tasks import keyed_replay
from tailrace.tasks.apply import advance_table
from tailrace.tasks.fold_files import FoldedFiles
from tailrace.tasks.keyed_replay import RefetchWork, ReplayRowsWork, replay_rows
from tests.support.changes import SHOP, move, update
from tests.support.engines import only_spark, spark_engine
from tests.support.pipelines import Pipeline, execute
from tests.support.quiet import Quiet
from tests.unit.tasks.test_fold_files_by_mode import pending

pytestmark = only_spark

NAMES = ("m", "s", "h", "a")
TABLES = """\
  engine: spark
  metadata: [_op]
  rules:
    "public.m": {columns: {x: number}}
    "public.s": {soft_delete: true}
    "public.[eh]": {mode: history}
    "public.a": {mode: append}
    "public.d": {on_bad_row: dead-letter, metadata: []}
"""
RUN_SECONDS_MAX = 900.0
SIZE = 5000
ROWS = 12

Row = tuple[int, int]
"""`x`, and how long the large text is."""


@dataclass
class Account:
    """What was done to a table, and what one of each mode must hold then."""

    url: str
    live: dict[int, Row] = field(default_factory=dict)
    marked: dict[int, tuple[Row, bool]] = field(default_factory=dict)
    versions: Counter[tuple[int, Row, bool]] = field(default_factory=Counter)
    changes: Counter[tuple[Any, ...]] = field(default_factory=Counter)

    def begin(self) -> None:
        """What a load reads."""
        for name in NAMES:
            execute(
                self.url,
                f"CREATE TABLE {name} (id int PRIMARY KEY, x int, large text)",
                f"ALTER TABLE {name} ALTER large SET STORAGE EXTERNAL",
                f"INSERT INTO {name} SELECT g, g, repeat('l', {SIZE}) FROM generate_series(1, {ROWS}) g",
            )
        for key in range(1, ROWS + 1):
            self.live[key] = (key, SIZE)
            self.marked[key] = (self.live[key], False)
            self.versions[key, self.live[key], True] += 1
            self.changes["read", key, key, SIZE] += 1

    def transact(self, some: random.Random) -> None:
        """One transaction, the same in every table."""
        before, touched, statements = dict(self.live), set[int](), list[str]()
        for _ in range(some.randint(1, 5)):
            statements.append(self._step(some, touched))
        with psycopg.connect(self.url) as connection:
            for name in NAMES:
                for statement in statements:
                    connection.execute(statement.format(name=name).encode())
        for key in touched:
            if key in before:
                self.versions[key, before[key], True] -= 1
                self.versions[key, before[key], False] += 1
            if key in self.live:
                self.versions[key, self.live[key], True] += 1

    def _step(self, some: random.Random, touched: set[int]) -> str:
        rarely = "truncate" if some.random() < 0.3 else "move"
        kind = some.choice(["insert", "update", "update", "move", "delete", rarely])
        free = some.choice([key for key in range(1, 40) if key not in self.live])
        value = some.randint(100, 200)
        if kind == "truncate":
            touched |= set(self.live)
            self.changes["truncate", None, None, None] += 1
            for key in list(self.live):
                self._gone(key)
            return "TRUNCATE {name}"
        if kind == "insert" or not self.live:
            touched.add(free)
            self._came(free, (value, 7), ("insert", free, value, 7))
            return f"INSERT INTO {{name}} VALUES ({free}, {value}, 'seven77')"
        key = some.choice(sorted(self.live))
        touched.add(key)
        size = self.live[key][1]
        # A large value that does not change is not sent; a small one is.
        sent = None if size == SIZE else size
        if kind == "update":
            self._came(key, (value, size), ("update", key, value, sent))
            return f"UPDATE {{name}} SET x = {value} WHERE id = {key}"
        self.changes["delete", key, None, None] += 1
        self._gone(key)
        if kind == "delete":
            return f"DELETE FROM {{name}} WHERE id = {key}"
        touched.add(free)
        self._came(free, (value, size), ("insert", free, value, sent))
        return f"UPDATE {{name}} SET id = {free}, x = {value} WHERE id = {key}"

    def _came(self, key: int, row: Row, said: tuple[Any, ...]) -> None:
        self.live[key], self.marked[key] = row, (row, False)
        self.changes[said] += 1

    def _gone(self, key: int) -> None:
        self.marked[key] = (self.live.pop(key), True)

    def check(self, lake: Path) -> None:
        """Hold the tables against it, and the mirror against the source too."""
        rows = {name: content(lake / "public" / name) for name in NAMES}
        mirror = {row["id"]: (row["number"], len(row["large"])) for row in rows["m"]}
        assert mirror == self.live
        with psycopg.connect(self.url) as connection:
            assert mirror == {key: (x, n) for key, x, n in connection.execute("SELECT id, x, length(large) FROM m")}
        assert {row["id"]: (whole(row), row["_deleted"]) for row in rows["s"]} == self.marked
        versions = Counter((row["id"], whole(row), row["_current"]) for row in rows["h"])
        assert versions == +self.versions
        in_order(rows["h"])
        said = Counter((row["_op"], row["id"], row["x"], row["large"] and len(row["large"])) for row in rows["a"])
        assert said == self.changes


def whole(row: dict[str, Any]) -> Row:
    return row["x"], len(row["large"])


def in_order(versions: list[dict[str, Any]]) -> None:
    """Time never goes back in the order of `_seq`, and versions of a row do not overlap."""
    versions = sorted(versions, key=lambda row: row["_seq"])
    starts = [row["_valid_from"] for row in versions]
    assert starts == sorted(starts)
    ends = dict[int, Any]()
    for row in versions:
        assert ends.get(row["id"], row["_valid_from"]) <= row["_valid_from"]
        assert (row["_valid_to"] is None) == row["_current"]
        ends[row["id"]] = row["_valid_to"]


def content(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pa.table(DeltaTable(str(folder)).scan()).to_pylist()
    return rows


def newest(folder: Path) -> str:
    return max((folder / "_delta_log").glob("*.json")).read_text()


def version(pipeline: Pipeline, name: str) -> int:
    return int(DeltaTable(str(pipeline.lake / "public" / name)).version())


def catch_up(pipeline: Pipeline) -> None:
    """A commit by Spark is several jobs, and there are many."""
    done = pipeline.call("run", "--until-caught-up", seconds=RUN_SECONDS_MAX)
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout}\n{done.stderr}"


def letters(pipeline: Pipeline) -> list[str]:
    found = json.loads(pipeline.ask("dead-letters", "list", "--json").stdout)["letters"]
    return [letter["code"] for letter in found]


def amounts(pipeline: Pipeline) -> dict[int, int]:
    return {row["id"]: int(row["n"]) for row in content(pipeline.lake / "public" / "d")}


def test_what_cannot_be_taken_is_set_aside_and_put_right_by_spark(tmp_path: Path) -> None:
    quiet = Quiet(tmp_path, on_bad_row="dead-letter", spec="engine: spark, soft_delete: true")
    quiet.load([{"id": key, "name": "n", "big": "x", "n": 0} for key in (1, 2, 3)])
    work = pending(quiet, [update(1, unfit=("n",)), update(2, n=2), *move(3, 4, n=3, unchanged=("big",))], 2)
    (outcome,) = spark_engine().run(advance_table, [work])
    assert (outcome.error, outcome.dead_letters, outcome.rows) == (None, 1, 4)
    assert quiet.ns() == {1: 0, 2: 2, 3: 0, 4: 3}
    asked = RefetchWork(
        log=work.log, schema=SHOP, expected=quiet.applied_position, reader=SnapshotReader("", None, None)
    )
    now = pa.Table.from_pylist([{"id": 1, "name": "now", "big": "y", "n": 7}], pa.schema(SHOP.row_fields()))
    keyed_replay._store_refetched(asked, now, [1], {})
    deliver = ReplayRowsWork(log=work.log, location=work.location, schema=SHOP, expected=quiet.applied_position)
    (done,) = spark_engine().run(replay_rows, [deliver])
    assert (done.error, done.rows, done.dead_letters, done.needs_refetch) == (None, 1, 0, False)
    assert "Apache-Spark" in newest(work.location.path)
    assert done.version == DeltaTable(str(work.location.path)).version()
    assert (quiet.ns(), quiet.rows()[1]["_deleted"]) == ({1: 7, 2: 2, 3: 0, 4: 3}, False)


def test_a_version_that_was_missing_is_put_in_by_spark_once(tmp_path: Path) -> None:
    quiet = Quiet(tmp_path, on_bad_row="dead-letter", spec="engine: spark, mode: history")
    quiet.load([{"id": key, "name": "n", "big": "x", "n": 0} for key in (1, 2)])
    work = pending(quiet, [update(1, unfit=("n",)), update(2, n=2)], 2)
    (outcome,) = spark_engine().run(advance_table, [work])
    assert (outcome.error, outcome.dead_letters) == (None, 1)
    asked = RefetchWork(
        log=work.log, schema=SHOP, expected=quiet.applied_position, reader=SnapshotReader("", None, None)
    )
    now = pa.Table.from_pylist([{"id": 1, "name": "now", "big": "y", "n": 7}], pa.schema(SHOP.row_fields()))
    deliver = ReplayRowsWork(log=work.log, location=work.location, schema=SHOP, expected=quiet.applied_position)
    keyed_replay._store_refetched(asked, now, [1], {})
    with spark_engine()._table(work.location).scratch() as scratch:
        staged = keyed_replay.stage_replay_rows(
            keyed_replay.StageReplayRowsWork(work=deliver, path=scratch / "ready.parquet")
        )
        assert isinstance(staged, FoldedFiles)
        spark_engine()._table(work.location).upsert_files(SHOP, staged, quiet.applied_position)  # and then it died
    (done,) = spark_engine().run(replay_rows, [deliver])
    assert (done.error, done.rows, done.dead_letters) == (None, 1, 0)
    found = sorted((row["_seq"], row["n"], row["_current"]) for row in quiet.content() if row["id"] == 1)
    assert found == [(0, 0, False), (1, 7, True)]


def test_tables_in_every_mode_are_what_was_done_to_them(database: str, tmp_path: Path) -> None:
    some, account = random.Random(20261116), Account(database)
    account.begin()
    execute(
        database,
        "CREATE TABLE d (id int PRIMARY KEY, n numeric(10, 2), large text)",
        "ALTER TABLE d ALTER large SET STORAGE EXTERNAL",
        f"INSERT INTO d SELECT g, g, repeat('l', {SIZE}) FROM generate_series(1, 4) g",
        "CREATE TABLE e (id int PRIMARY KEY, x int)",
        "INSERT INTO e VALUES (1, 1), (2, 2)",
    )
    pipeline = Pipeline(tmp_path / "one", database)
    pipeline.file.write_text(pipeline.file.read_text() + TABLES)
    catch_up(pipeline)
    account.check(pipeline.lake)

    for _ in range(25):
        account.transact(some)
    execute(
        database,
        "UPDATE d SET n = 'NaN' WHERE id = 1",
        "UPDATE d SET n = 20 WHERE id = 2",
        "DELETE FROM d WHERE id = 3",
    )
    catch_up(pipeline)
    account.check(pipeline.lake)
    for name in NAMES:
        assert "Apache-Spark" in newest(pipeline.lake / "public" / name)
    assert (amounts(pipeline), letters(pipeline)) == ({1: 1, 2: 20, 4: 4}, ["value-unfit"])

    # A change builds on the one that is missing; a replay puts both right.
    execute(
        database,
        "UPDATE d SET n = 10 WHERE id = 1",
        "ALTER TABLE e ADD y int DEFAULT 7",
        "UPDATE e SET x = 10 WHERE id = 1",
    )
    for _ in range(5):
        account.transact(some)
    assert pipeline.ask("dead-letters", "replay").returncode == 0
    catch_up(pipeline)
    account.check(pipeline.lake)
    versions = {(row["id"], row["x"], row["y"], row["_current"]) for row in content(pipeline.lake / "public" / "e")}
    assert versions == {(1, 1, 7, False), (1, 10, 7, True), (2, 2, 7, True)}
    assert (amounts(pipeline), letters(pipeline)) == ({1: 10, 2: 20, 4: 4}, [])
    assert "Apache-Spark" in newest(pipeline.lake / "public" / "d")

    # Made anew of their own versions and the log, then compared with the source: the past stays as it was.
    for name in NAMES:
        done = pipeline.ask("rebuild", f"public.{name}", "--from-version", "0", "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["changes"] > 0
    account.check(pipeline.lake)
    before = {name: version(pipeline, name) for name in ("m", "s", "h")}
    assert pipeline.ask("snapshot", *(f"public.{name}" for name in before)).returncode == 0
    catch_up(pipeline)
    assert all(version(pipeline, name) > number for name, number in before.items())
    account.check(pipeline.lake)
