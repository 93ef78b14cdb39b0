"""Tables discovered by their rows: a pipeline is not idle until it manages them."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import cast

from tailrace.capture.postgres.source import PostgresCapture
from tailrace.errors import SourceUnreachable
from tailrace.model.schema import TableSchema
from tailrace.pipeline.config.settings import LoadSettings
from tailrace.pipeline.loads.load_start import LoadStarter
from tailrace.pipeline.tables.registry import TableRegistry
from tailrace.pipeline.tables.retention_holds import RetentionHolds
from tests.support.changes import SHOP
from tests.support.logs import inserts
from tests.support.quiet import Quiet


class Routed:
    """A source whose tables are discovered by the rows routed to them."""

    discovers_tables = True

    def __init__(self, registry: TableRegistry) -> None:
        self.registry = registry
        self.seen: list[tuple[bool, bool]] = []
        """For each call: whether the table was managed already, and whether a table was unseen."""
        self.gone = False

    def learn_tables(self, schemas: Iterable[TableSchema]) -> None:
        self.known = [schema.table for schema in schemas]

    def tables(self) -> list[object]:
        self.seen.append((SHOP.table in self.registry.tables, self.load_starter.has_unseen_tables))
        if self.gone:
            raise SourceUnreachable("the server does not answer", hint="Is it up?")
        assert self.known == [SHOP.table]
        self.registry.add(SHOP.table)
        return []

    def starter(self) -> LoadStarter:
        source = cast(PostgresCapture, self)
        self.load_starter = LoadStarter(
            LoadSettings(),
            source,
            self.registry,
            RetentionHolds(self.registry),
            run=lambda _task, _works: [],
            begun=lambda _load: None,
            failed=lambda _life, _error: None,
            stopping=threading.Event(),
        )
        return self.load_starter


def routed(folder: Path) -> Routed:
    quiet = Quiet(folder)
    quiet.diary.commit(inserts(1))
    registry = quiet.registry()
    registry.refresh_index()
    return Routed(registry)


def test_a_table_discovered_by_its_rows_is_unseen_until_it_is_managed(tmp_path: Path) -> None:
    source = routed(tmp_path)
    starter = source.starter()
    assert starter.has_unseen_tables
    starter.discover_tables()
    assert source.seen == [(False, True)]
    assert not starter.has_unseen_tables


def test_a_discovered_table_stays_unseen_while_the_source_does_not_answer(tmp_path: Path) -> None:
    source = routed(tmp_path)
    starter, source.gone = source.starter(), True
    starter.discover_tables()
    assert starter.has_unseen_tables
