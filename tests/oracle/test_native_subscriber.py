"""Our Delta tables against a native subscriber's tables, and both against the source.

The whole pipeline runs as a user runs it, is killed and started again; the same random SQL reaches both replicas.
Content must be the same in all three places.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from hypothesis import given, note, seed

from tailrace.capture.postgres.preflight import horizon
from tailrace.demo.compare import compare
from tailrace.demo.server import EmbeddedPostgres
from tailrace.model.position import Lsn
from tests.oracle import conftest
from tests.support.oracle_native import Subscriber
from tests.support.pipelines import Pipeline, Running, assert_log_is_whole, eventually
from tests.support.workload import Look, Player, Script, filling, scripts
from tests.support.workload_tables import SECOND_SCHEMA, TABLES

REPLICATED = tuple(table for table in TABLES if table.logged)
NAMES = [(table.schema, table.name) for table in REPLICATED]
APPLY_SECONDS_MAX = 90.0
KILLS_EVERY = 6
"""In a long run the pipeline is killed in one of so many scripts; and in every run while it loads its tables."""


@pytest.fixture(scope="module")
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

    def has_all_up_to(self, position: Lsn) -> bool:
        status = self.pipeline.status()
        tables = {(table["schema"], table["table"]): table for table in status["tables"]}
        failed = [table for table in tables.values() if table["state"] in ("failed", "needs_snapshot")]
        assert not failed, failed
        return (
            Lsn.parse(status["log"]["position"] or "0/0") >= position
            and tables.keys() >= set(NAMES)
            and all(
                table["applied_commit"] is not None and table["rows_applied"] == table["rows_captured"]
                for table in tables.values()
            )
        )

    def catch_up(self, position: Lsn) -> None:
        def arrived() -> bool:
            assert self._running is not None
            assert self._running.process.poll() is None, self._running.said()
            return self.has_all_up_to(position)

        assert eventually(arrived, APPLY_SECONDS_MAX, pause=0.2), self._running and self._running.said()

    def end(self) -> None:
        """Told to stop, it leaves nothing behind."""
        if self._running is not None and self._running.process.poll() is None:
            self._running.terminate()
        if self._running is not None:
            self._running.end()


def disagreements(source: str, subscriber: str, lake: Path, names: Sequence[tuple[str, str]]) -> list[str]:
    """What differs between the lake's tables and the two databases'."""
    found = []
    for place, url in (("the source", source), ("the subscriber", subscriber)):
        found += [f"lake and {place}: {verdict}" for verdict in compare(url, lake, names) if not verdict.equal]
    return found


@pytest.mark.timeout(7200)
def test_the_lake_a_native_subscriber_and_the_source_hold_the_same_rows(
    servers: tuple[EmbeddedPostgres, EmbeddedPostgres], tmp_path: Path
) -> None:
    source, target = servers
    seen: Counter[str] = Counter()
    long = "TAILRACE_ORACLE_EXAMPLES" in os.environ
    with closing(Subscriber(source, target, REPLICATED)) as subscriber, closing(Player(source.url())) as player:
        tables = f'["public.*", "{SECOND_SCHEMA}.*"]'
        mirror = Mirror(Pipeline(tmp_path / "pipeline", source.url(), tables=tables))
        player.play(Script(REPLICATED, (filling(REPLICATED),)))

        def settled() -> list[str]:
            with source.connect() as connection:
                mirror.catch_up(horizon(connection))
            subscriber.catch_up()
            return disagreements(source.url(), subscriber.url, mirror.pipeline.lake, NAMES)

        def kill_now_and_then(look: Look) -> None:
            if long and mirror.kills * KILLS_EVERY < seen["scripts"]:
                mirror.kill()
                mirror.start()

        @seed(conftest.seed())
        @conftest.examples(3)
        @given(script=scripts(REPLICATED, looks=True, told_only=True, bursts_min=4))
        def agree(script: Script) -> None:
            seen["scripts"] += 1
            player.said.clear()
            player.truncate(REPLICATED)
            player.play(script, kill_now_and_then)
            found = settled()
            if found:
                note("\n".join(player.said))
            assert not found, "\n".join(found)

        try:
            mirror.start()
            assert eventually(mirror.has_begun, APPLY_SECONDS_MAX), mirror.pipeline.status()
            mirror.kill()
            mirror.start()
            agree()
        finally:
            mirror.end()
        assert player.done["commit"] > 5 * seen["scripts"], player.done
        assert player.done["refused"] < player.done["done"] / 4, player.done
        assert_log_is_whole(mirror.pipeline.log)
