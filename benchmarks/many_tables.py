"""many-tables: whether a micro-batch costs the same when the pipeline has many tables that did not change.

There are two databases of small tables of pg-stream's 8 columns, 5 in one and 200 in the other, each with a `tailrace
run` of its own. A batch is one transaction that changes 5 tables, 20 rows of each; of the 200 it is always the next 5.
Its time starts just before the transaction is sent. It ends when a reader that opens each of the 5 Delta tables afresh
sees its rows. With 200 tables a batch may take twice as long as with 5: the ratio is the inverse, so it must reach 0.5.

For this to be fair:
- nothing is taken out. Included are capture, the log, waking Spark, planning what each table needs, tasks, merges, and
  the pipeline's other work (its status, its ledger, its watch of the source). The changes are few, so that the cost of
  a table without changes is not hidden behind merging;
- in a round the pipelines run one after the other, so that neither disturbs the other. Each is restarted over the
  tables it has. Batches before the clock warm it up;
- the next batch is sent when the pipeline has rested from the last one: it rests as long as it has worked;
- the value of a round is the median of its batches.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import psycopg

from benchmarks import machine, ours
from benchmarks.cells import Cell, CellsResult, Pair
from benchmarks.measure import BenchError, progress, scaled
from benchmarks.pipelines import FreshReader, running
from benchmarks.postgres import Admin, ask, server_settings
from benchmarks.workloads import orders_table
from tailrace.demo.server import EmbeddedPostgres
from tailrace.demo.server_binaries import ServerFailed

COST_TIMES_MAX = 2.0
TABLES_FEW, TABLES_MANY = 5, 200
TABLES_CHANGED = 5
ROWS = 10_000
"""Of a table, before the first batch."""
INSERTS, UPDATES, DELETES = 10, 8, 2
BATCHES = 20
"""In a round, of each pipeline."""
BATCHES_BEFORE = 3
LOAD_SECONDS_MAX = 1_200.0
SEEN_SECONDS_MAX = 60.0
LOOK_SECONDS = 0.005
REST_SECONDS = 0.3
SUBJECT = "tailrace run: commit at the source to rows in a fresh reader of the Delta tables"


@dataclass(frozen=True)
class ManyTables:
    """The bench."""

    about: str
    name: str = "many-tables"
    limits: dict[str, float] = field(default_factory=lambda: {_cell(TABLES_MANY): 1 / COST_TIMES_MAX})

    def run(self, rounds: int, scale: float) -> CellsResult:
        """Make and load the tables once, then let both pipelines work in every round."""
        described = machine.describe(ours.log_parent_folder())
        many = scaled(TABLES_MANY, scale, least=2 * TABLES_CHANGED)
        batches, rows = scaled(BATCHES, scale, least=2), scaled(ROWS, scale, least=1000)
        try:
            with ours.new_folder() as folder, EmbeddedPostgres(settings=server_settings(slots=12)) as server:
                version = _fill(server, {"few": TABLES_FEW, "many": many}, rows)
                few, wide = (
                    _Pipeline(folder / name, server, name, tables, rows)
                    for name, tables in (("few", TABLES_FEW), ("many", many))
                )
                pairs = [_round(number, wide, few, batches) for number in range(1, rounds + 1)]
        except (ServerFailed, psycopg.Error) as exc:
            raise BenchError(f"the embedded PostgreSQL failed: {exc}", hint="Its log says more.") from exc
        described["versions"]["postgresql"] = version
        return CellsResult(
            name=self.name,
            peer_name=_cell(TABLES_FEW),
            cells=(Cell(name=_cell(TABLES_MANY), unit="ms", must_reach=1 / COST_TIMES_MAX, pairs=tuple(pairs)),),
            machine=described,
            setup={
                "ours": SUBJECT,
                "workload": (
                    f"{many} tables of {rows:,} rows; {batches} batches of {TABLES_CHANGED} tables, "
                    f"{INSERTS + UPDATES + DELETES} rows each"
                ),
                "transport": f"TCP {EmbeddedPostgres.host}",
            },
            scale=scale,
        )


def _cell(tables: int) -> str:
    return f"{tables} tables"


def _fill(server: EmbeddedPostgres, databases: dict[str, int], rows: int) -> str:
    """Make the databases; the server's version."""
    with server.connect(autocommit=True) as admin:
        for name in databases:
            admin.execute(f"create database {name}".encode())
        version = str(ask(admin, "show server_version"))
    for name, tables in databases.items():
        progress(f"making {tables} tables of {rows:,} rows")
        with server.connect(name, autocommit=True) as connection:
            for number in range(tables):
                connection.execute(orders_table(f"t{number}", rows).encode())
            connection.execute("analyze")
    return version


class _Pipeline:
    """One database, its pipeline's folder, and which batch is next."""

    def __init__(self, folder: Path, server: EmbeddedPostgres, database: str, tables: int, rows: int) -> None:
        self._folder, self._server, self._database = folder, server, database
        self._tables, self._rows = tables, rows
        self._number = 0

    def batches(self, count: int) -> float:
        """Run the pipeline for so many batches; the median of their milliseconds."""
        url = self._server.url(self._database)
        with (
            running(self._folder, url, self._tables, load_seconds_max=LOAD_SECONDS_MAX) as lake,
            self._server.connect(self._database, autocommit=True) as connection,
        ):
            readers = [FreshReader(lake / "public" / f"t{number}") for number in range(self._tables)]
            for reader in readers:
                reader.newest_key()
            took = [self._batch(connection, readers) for _ in range(BATCHES_BEFORE + count)]
        return 1000 * statistics.median(took[BATCHES_BEFORE:])

    def _batch(self, connection: Admin, readers: list[FreshReader]) -> float:
        turn = self._number * TABLES_CHANGED
        tables = [place % self._tables for place in range(turn, turn + TABLES_CHANGED)]
        # How often each of them was changed before.
        before = turn // self._tables
        self._number += 1
        begun = time.monotonic()
        with connection.pipeline(), connection.transaction():
            for table in tables:
                for statement in _changes(table, self._rows, before):
                    connection.execute(statement.encode())
        newest = self._rows + (before + 1) * INSERTS
        unseen = set(tables)
        while unseen:
            for table in list(unseen):
                if (readers[table].newest_key() or 0) >= newest:
                    unseen.remove(table)
            if time.monotonic() > begun + SEEN_SECONDS_MAX:
                raise BenchError("a batch cannot be seen", hint=(self._folder / "run.log").read_text()[-2000:])
            time.sleep(LOOK_SECONDS)
        took = time.monotonic() - begun
        time.sleep(REST_SECONDS + 1.5 * took)
        return took


def _changes(table: int, rows: int, before: int) -> list[str]:
    """Statements of one batch for one table: new keys, older ones changed, and some of those deleted."""
    first, old = rows + before * INSERTS + 1, before * (UPDATES + DELETES) % (rows // 2)
    fresh = "g, g % 10000, 'new', 1.5, 'some note text number ' || g, now(), true, 0.5"
    return [
        f"insert into t{table} select {fresh} from generate_series({first}, {first + INSERTS - 1}) g",
        f"update t{table} set status = 'changed' where id between {old + 1} and {old + UPDATES}",
        f"delete from t{table} where id between {old + UPDATES + 1} and {old + UPDATES + DELETES}",
    ]


def _round(number: int, many: _Pipeline, few: _Pipeline, batches: int) -> Pair:
    peer, mine = few.batches(batches), many.batches(batches)
    progress(f"round {number}: {mine:.0f} ms a batch, with {TABLES_FEW} tables {peer:.0f} ms")
    return Pair(ours=mine, peer=peer)


BENCH = ManyTables(about=__doc__)
