"""Our Delta tables against a native subscriber's tables, and both against the source.

The whole pipeline runs as a user runs it, is killed and started again; the same random SQL reaches both replicas.
Content must be the same in all three places.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, note, seed

from tailrace.capture.postgres.preflight import committed_until
from tailrace.demo.compare import compare
from tailrace.demo.server import EmbeddedPostgres
from tailrace.model.position import Lsn
from tests.oracle import conftest
from tests.support import oracle_native
from tests.support.oracle_native import Published, Subscriber
from tests.support.pipelines import Pipeline, Running, assert_log_is_whole, eventually
from tests.support.workload import Look, Player, Script, filling, scripts
from tests.support.workload_tables import SECOND_SCHEMA, TABLES, Table

REPLICATED = tuple(table for table in TABLES if table.logged)
BY_NAME = {(table.schema, table.name): table for table in REPLICATED}
IN_PART = (
    Published(
        table=BY_NAME["public", "keyed"], how="(id, n, name) where (id < 50)",
        made_as=("create table keyed (id int8 primary key, n int4, name text)",),
    ),
    Published(table=BY_NAME["public", "full_keyed"], how="where (n > 0 or name = 'a')"),
    Published(table=BY_NAME["public", "keyless"], how="where (a <> 2)"),
    Published(table=BY_NAME["public", "parted"], how="where (id > 2)"),
    Published(table=BY_NAME["public", "numbers"], how="where (id % 2 = 0)"),
    Published(table=BY_NAME["public", "shapes"], how="where (rt is null or id < 4)"),
)  # fmt: skip
"""A condition on what is not the key needs REPLICA IDENTITY FULL."""
APPLY_SECONDS_MAX = 600.0
KILLS_EVERY = 6
"""In a long run the pipeline is killed in one of so many scripts; and in every run while it loads its tables."""


@pytest.fixture
def servers() -> Iterator[tuple[EmbeddedPostgres, EmbeddedPostgres]]:
    with ExitStack() as stack:
        found = [
            stack.enter_context(EmbeddedPostgres(version=conftest.server_version(), settings=conftest.SETTINGS))
            for _ in range(2)
        ]
        yield found[0], found[1]


class Mirror:
    """The pipeline under way, and its end by force."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self._running: Running | None = None
        self.kills = 0

    def start(self) -> None:
        self._running = self.pipeline.start("run")

    def kill(self) -> None:
        assert self._running is not None
        self._running.kill_group()
        self._running.end()
        self.kills += 1

    def has_begun(self) -> bool:
        """Whether a table is loaded, and not yet all of them."""
        return any(table["applied_commit"] is not None for table in self.pipeline.status()["tables"])

    def has_all_up_to(self, position: Lsn, wanted: Sequence[Table]) -> bool:
        status = self.pipeline.status()
        tables = {(table["schema"], table["table"]): table for table in status["tables"]}
        failed = [table for table in tables.values() if table["state"] in ("failed", "needs_snapshot")]
        assert not failed, failed
        return (
            Lsn.parse(status["log"]["position"] or "0/0") >= position
            and tables.keys() >= {(table.schema, table.name) for table in wanted}
            and all(
                table["applied_commit"] is not None and table["rows_applied"] == table["rows_captured"]
                for table in tables.values()
            )
        )

    def catch_up(self, position: Lsn, wanted: Sequence[Table]) -> None:
        def arrived() -> bool:
            assert self._running is not None
            assert self._running.process.poll() is None, self._running.said()
            return self.has_all_up_to(position, wanted)

        assert eventually(arrived, APPLY_SECONDS_MAX, pause=0.2), self._running and self._running.said()

    def end(self) -> None:
        """Told to stop, it leaves nothing behind."""
        if self._running is not None and self._running.process.poll() is None:
            self._running.terminate()
        if self._running is not None:
            self._running.end()


def differences(place: str, url: str, lake: Path, tables: Sequence[Table]) -> list[str]:
    """What differs between the lake's tables and a database's."""
    names = [(table.schema, table.name) for table in tables]
    return [f"lake and {place}: {verdict}" for verdict in compare(url, lake, names) if not verdict.equal]


@dataclass
class Race:
    """The source, the two that follow it, and the scripts that it plays to them."""

    source: EmbeddedPostgres
    subscriber: Subscriber
    player: Player
    mirror: Mirror
    tables: Sequence[Table]
    whole: bool
    """Whether all of each table is published: then the source can be compared too."""
    scripts: int = 0

    def run(self, few: int) -> None:
        """Have random scripts played, and after each compare."""
        long = "TAILRACE_ORACLE_EXAMPLES" in os.environ

        def kill_now_and_then(look: Look) -> None:
            if long and self.mirror.kills * KILLS_EVERY < self.scripts:
                self.mirror.kill()
                self.mirror.start()

        @seed(conftest.seed())
        @conftest.examples(few)
        @given(script=scripts(self.tables, looks=True, told_only=True, bursts_min=4))
        def agree(script: Script) -> None:
            self.scripts += 1
            self.player.said.clear()
            self.player.truncate(self.tables)
            self.player.play(script, kill_now_and_then)
            found = self.settled()
            if found:
                note("\n".join(self.player.said))
            assert not found, "\n".join(found)

        try:
            self.player.play(Script(tuple(self.tables), (filling(self.tables),)))
            self.mirror.start()
            assert eventually(self.mirror.has_begun, APPLY_SECONDS_MAX), self.mirror.pipeline.status()
            self.mirror.kill()
            self.mirror.start()
            agree()
        finally:
            self.mirror.end()
        done = self.player.done
        assert done["commit"] > 5 * self.scripts, done
        assert done["refused"] < done["done"] / 4, done
        assert_log_is_whole(self.mirror.pipeline.log)

    def settled(self) -> list[str]:
        """What differs once both have all that is committed."""
        with self.source.connect() as connection:
            self.mirror.catch_up(committed_until(connection), self.tables)
        self.subscriber.catch_up()
        lake = self.mirror.pipeline.lake
        found = differences("the subscriber", self.subscriber.url, lake, self.tables)
        return found + differences("the source", self.source.url(), lake, self.tables) if self.whole else found


@pytest.mark.timeout(7200)
def test_the_lake_a_native_subscriber_and_the_source_hold_the_same_rows(
    servers: tuple[EmbeddedPostgres, EmbeddedPostgres], tmp_path: Path
) -> None:
    source, target = servers
    pipeline = Pipeline(tmp_path / "pipeline", source.url(), tables=f'["public.*", "{SECOND_SCHEMA}.*"]')
    with closing(Subscriber(source, target, REPLICATED)) as subscriber, closing(Player(source.url())) as player:
        Race(source, subscriber, player, Mirror(pipeline), REPLICATED, whole=True).run(few=3)


@pytest.mark.skipif(
    "TAILRACE_ORACLE_EXAMPLES" not in os.environ,
    reason="one more pipeline: it runs where TAILRACE_ORACLE_EXAMPLES says how many scripts to try",
)
@pytest.mark.timeout(7200)
def test_both_hold_the_same_rows_and_columns_of_tables_that_are_published_in_part(
    servers: tuple[EmbeddedPostgres, EmbeddedPostgres], tmp_path: Path
) -> None:
    source, target = servers
    tables = [part.table for part in IN_PART]
    extra = f"  publication: {{name: {oracle_native.NAME}, create: false}}\n"
    pipeline = Pipeline(tmp_path / "pipeline", source.url(), extra=extra)
    with closing(Subscriber(source, target, tables, IN_PART)) as subscriber, closing(Player(source.url())) as player:
        Race(source, subscriber, player, Mirror(pipeline), tables, whole=False).run(few=1)
