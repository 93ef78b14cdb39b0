"""A pipeline without a source: a log that a test writes, and lake tables that are brought to its end here.

`python -m tests.support.quiet FILE` does that in a process of its own, so that it can be killed on the way.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tailrace.changelog.read.reader import ChangeLog
from tailrace.changelog.write.log_lease import LogLease
from tailrace.deadletters.store import DeadLetterBatch, DeadLetterStore
from tailrace.model import change
from tailrace.model.catalogue_facts import CatalogueFacts, ColumnFacts, StorageFacts
from tailrace.model.position import Lsn
from tailrace.model.schema import TableId, TableSchema
from tailrace.pipeline.config.settings import PipelineSettings, load_settings
from tailrace.pipeline.loads.kept_loads import LoadKeeper
from tailrace.pipeline.status import APPLIER_LEASE
from tailrace.pipeline.tables.registry import TableRegistry
from tailrace.tables.delta.table import DeltaRsTable
from tailrace.tables.fold.by_mode import with_added_columns
from tailrace.tables.location import TableLocation
from tailrace.tables.port import AppliedPosition
from tailrace.tables.spec import LoadOrigin
from tailrace.tables.staging import stage
from tailrace.tasks.apply import advance_table
from tailrace.tasks.load_store import LoadStore, StagedChunk
from tailrace.tasks.work import ApplyWork, EvolveWork, Outcome
from tests.support.changes import SHOP, Change, record_batches
from tests.support.engines import IS_ICEBERG, IS_SPARK, iceberg_table, rows_of, spark_engine
from tests.support.logs import STEP, Diary
from tests.support.windows import window

SETTINGS = """\
name: quiet
source:
  url: postgresql://app:s3cret-word@127.0.0.1:1/shop
  tables: ["public.*"]
log: ./log
tables: {{format: {format}, path: ./lake, on_bad_row: {on_bad_row}{form}}}
"""
THINGS = TableId("public", "things")


def told(*names: str) -> CatalogueFacts:
    """What the catalogue says of a table of these columns."""
    columns = tuple(
        ColumnFacts(
            number=SHOP.names.index(name) + 1, nullable=True, default=None, fast_default=None, definition_version=1
        )
        for name in names
    )
    stored = StorageFacts(relation=SHOP.relation or 0, name="public.things", file=5, attached=False)
    return CatalogueFacts(columns=columns, storage=(stored,), columns_ever=len(SHOP.names))


FULL = replace(SHOP, facts=told(*SHOP.names))
NARROW = replace(
    SHOP, columns=tuple(column for column in SHOP.columns if column.name != "name"), facts=told("id", "big", "n")
)
"""The same table before and after a column of it was dropped."""


class Quiet:
    """One pipeline of one table, whose source never answers."""

    def __init__(self, folder: Path, *, on_bad_row: str = "stop", form: str = "", table_format: str = "delta") -> None:
        self.file = folder / "tailrace.yaml"
        folder.mkdir(parents=True, exist_ok=True)
        said = SETTINGS.format(format=table_format, on_bad_row=on_bad_row, form=f", {form}" if form else "")
        self.file.write_text(said)
        self.diary = Diary(folder / "log")

    @property
    def settings(self) -> PipelineSettings:
        return load_settings(self.file)

    @property
    def table(self) -> DeltaRsTable:
        assert self.place.catalog is None
        return self.place.open()

    @property
    def place(self) -> TableLocation:
        return self.settings.tables.layout.location(THINGS, ChangeLog.open(self.settings.log.path).log_id)

    @property
    def cursor(self) -> AppliedPosition:
        found = self.place.open_for_reading().applied_position()
        assert found is not None
        return found

    def load(self, rows: Sequence[dict[str, Any]] = (), schema: TableSchema = SHOP) -> None:
        """What a load leaves that saw these rows and nothing of the log."""
        self.diary.commit()
        lives = self.lives()
        at = lives.index.position
        table = self.table if self.place.catalog is None else iceberg_table(self.place)
        table.load(schema, record_batches(schema, rows), lives.applied_position_at(at))

    def load_anew(
        self,
        rows: Sequence[dict[str, Any]],
        name: str,
        schema: TableSchema = SHOP,
        *,
        passed: Lsn | None = None,
        letters: Sequence[DeadLetterBatch] = (),
    ) -> None:
        """What a load leaves that saw these rows and all of the log; with `passed`, some rows as they were later, and
        with `letters`, others that it could not bring."""
        lives = self.lives()
        at = lives.index.position
        cursor = replace(lives.applied_position_at(at), load=name)
        path = self.settings.log.path
        LoadStore(path).folder(name).mkdir(parents=True, exist_ok=True)
        LoadStore(path).record_commit(name, passed or at)
        now, aside = self.place.open_for_reading().applied_position(), DeadLetterStore(path, THINGS)
        aside.before_load(name, whole=True, now=now.load if now else None, seq=cursor.seq)
        if letters:
            aside.write_load_rejects(name, cursor.seq, letters)
        if self.place.catalog is None:
            self.table.load(schema, record_batches(schema, rows), cursor)
        else:
            self._land(schema, rows, cursor)

    def _land(self, schema: TableSchema, rows: Sequence[dict[str, Any]], cursor: AppliedPosition) -> None:
        """Stage rows as a task of a load does, and land them in an Iceberg table."""
        place, name = self.place, cursor.load or ""
        origin = LoadOrigin(seq=cursor.seq, position=str(cursor.position), read_at=time.time_ns() // 1000)
        own = with_added_columns(place.spec, schema, record_batches(schema, rows), origin)
        stored, by = place.spec.stored_schema(schema), place.spec.partition_by
        files = stage(place.staging, f"{name}-000000", stored, own, by, numbered=True)
        done = StagedChunk(
            chunk=0,
            files=files,
            keys=(),
            rows=len(rows),
            bytes=0,
            seconds=0.0,
            seen_until=cursor.position,
            dead_letters=0,
        )
        LoadStore(self.settings.log.path).record_chunk(name, done)
        iceberg_table(place).commit_load(schema, files, cursor, origin=origin)

    def keep(self, name: str) -> LoadKeeper:
        """What the pipeline does once a load has landed."""
        kept = self.seed_keeping()
        kept.keep(self.lives().add(THINGS), name)
        return kept

    def seed_keeping(self) -> LoadKeeper:
        tables = self.settings.tables
        return LoadKeeper(tables.keep_seed, tables.layout, self.lives())

    def commit(self, *rows: Change, schema: TableSchema = SHOP) -> Lsn:
        """One commit of the log; where it ends."""
        self.diary.commit((schema, list(rows)))
        return self.diary.writer.position

    def commit_two(self, first: Sequence[Change], second: Sequence[Change]) -> tuple[Lsn, Lsn]:
        """One commit of two transactions; where each ends."""
        begin = self.diary.writer.position.value
        ends = Lsn(begin + STEP // 2), Lsn(begin + STEP)
        (made,) = self.diary._batches([(SHOP, [*first, *second])], "")
        place = made.data.schema.get_field_index(change.POSITION)
        texts = [str(ends[0])] * len(first) + [str(ends[1])] * len(second)
        data = made.data.set_column(place, made.data.schema.field(place), pa.array(texts))
        self.diary.writer.append(window(begin, begin + STEP, replace(made, data=data), transactions=2))
        return ends

    def lives(self) -> TableRegistry:
        settings = self.settings
        lives = TableRegistry(ChangeLog.open(settings.log.path), settings.tables.layout, settings.tables.policies_of)
        lives.refresh_index()
        return lives

    def apply(self, to: int | None = None) -> list[Outcome]:
        """Bring the table to a commit, or to the end of the log."""
        return apply(self.settings, to)

    def apply_killed(self, failpoint: str, hits: Path) -> int:
        """The same in a process that dies at a named place; how that ended."""
        return subprocess.run(
            [sys.executable, "-m", "tests.support.quiet", str(self.file)],
            check=False,
            start_new_session=True,
            env={**os.environ, "TAILRACE_FAILPOINT": failpoint, "TAILRACE_FAILPOINT_LOG": str(hits)},
        ).returncode

    def content(self) -> list[dict[str, Any]]:
        """The lake table's rows."""
        path = self.settings.tables.layout.path(THINGS)
        if self.place.catalog is not None:
            rows: list[dict[str, Any]] = rows_of(path).to_pylist()
            return rows
        return [row for file in self.table.files() for row in pq.read_table(path / file).to_pylist()]

    def rows(self) -> dict[int, dict[str, Any]]:
        """The same by key."""
        found = self.content()
        assert len({row["id"] for row in found}) == len(found), "a key stands in one row"
        return {row["id"]: row for row in found}

    def ns(self) -> dict[int, Any]:
        """The value of `n` in each row."""
        return {key: row["n"] for key, row in sorted(self.rows().items())}


def apply(settings: PipelineSettings, to: int | None = None) -> list[Outcome]:
    log = ChangeLog.open(settings.log.path)
    lives = TableRegistry(log, settings.tables.layout, settings.tables.policies_of)
    newest = lives.refresh_index()
    end = newest if to is None else to
    life = lives.add(THINGS)
    outcomes: list[Outcome] = []
    held = LogLease(log.path, APPLIER_LEASE)
    try:
        while (stretch := lives.next_range(life, end)) is not None:
            assert life.applied_position is not None
            assert life.schema is not None
            work: ApplyWork | EvolveWork = ApplyWork(
                table=THINGS,
                log=log.path,
                location=life.location,
                slices=stretch.slices,
                schema=life.schema,
                expected=life.applied_position,
                position_after=stretch.position_after,
                dead_letters_enabled=settings.tables.dead_letters_enabled(THINGS),
            )
            if stretch.recast is not None:
                work = EvolveWork(
                    table=THINGS, location=life.location, recast=stretch.recast, expected=life.applied_position
                )
            outcome = _advanced(work)
            outcomes.append(outcome)
            if outcome.error is not None:
                break
            assert outcome.applied_position is not None
            assert outcome.schema is not None
            life.record_commit(outcome.applied_position, outcome.schema)
    finally:
        held.release()
    return outcomes


def _advanced(work: ApplyWork | EvolveWork) -> Outcome:
    """The work, done by whoever writes the table: Iceberg's connector writes no Delta tables."""
    if not IS_SPARK or (IS_ICEBERG and work.location.catalog is None):
        return advance_table(work)
    (outcome,) = spark_engine().run(advance_table, [work])
    return outcome


if __name__ == "__main__":
    apply(load_settings(sys.argv[1]))
