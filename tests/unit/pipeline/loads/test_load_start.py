"""Tables that only rows tell of: nobody may take a pipeline for idle that has not followed them yet."""

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
    """A source whose tables are those that its rows were routed to."""

    discovers_tables = True

    def __init__(self, registry: TableRegistry) -> None:
        self.lives = registry
        self.seen: list[tuple[bool, bool]] = []
        """Each time it was asked: whether the table was followed already, and whether something was behind."""
        self.gone = False

    def learn_tables(self, shapes: Iterable[TableSchema]) -> None:
        self.known = [shape.table for shape in shapes]

    def tables(self) -> list[object]:
        self.seen.append((SHOP.table in self.lives.tables, self.beginning.has_unseen_tables))
        if self.gone:
            raise SourceUnreachable("the server does not answer", hint="Is it up?")
        assert self.known == [SHOP.table]
        self.lives.add(SHOP.table)
        return []

    def begins(self) -> LoadStarter:
        source = cast(PostgresCapture, self)
        self.beginning = LoadStarter(
            LoadSettings(),
            source,
            self.lives,
            RetentionHolds(self.lives),
            run=lambda _task, _works: [],
            begun=lambda _load: None,
            failed=lambda _life, _error: None,
            stopping=threading.Event(),
        )
        return self.beginning


def routed(folder: Path) -> Routed:
    quiet = Quiet(folder)
    quiet.diary.commit(inserts(1))
    registry = quiet.registry()
    registry.refresh_index()
    return Routed(registry)


def test_a_table_is_behind_until_it_is_followed(tmp_path: Path) -> None:
    source = routed(tmp_path)
    begins = source.begins()
    assert begins.has_unseen_tables
    begins.discover_tables()
    assert source.seen == [(False, True)]
    assert not begins.has_unseen_tables


def test_it_stays_behind_while_the_source_does_not_answer(tmp_path: Path) -> None:
    source = routed(tmp_path)
    begins, source.gone = source.begins(), True
    begins.discover_tables()
    assert begins.has_unseen_tables
