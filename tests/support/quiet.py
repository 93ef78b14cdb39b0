"""A pipeline without a source: a log that a test writes, and a lake table that applies it in this process.

`python -m tests.support.quiet FILE` applies in a process of its own, so that a test can kill it.
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
from tailrace.deadletters.step_file import DeadLetterBatch
from tailrace.deadletters.store import DeadLetterStore
from tailrace.model import change
from tailrace.model.catalogue_facts import CatalogueFacts, ColumnFacts, StorageFacts
from tailrace.model.position import Lsn
from tailrace.model.schema import TableId, TableSchema
from tailrace.pipeline.config.settings import PipelineSettings
from tailrace.pipeline.config.settings_file import load_settings
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


def facts_of(*names: str) -> CatalogueFacts:
    """Return catalogue facts of a table with these columns."""
    columns = tuple(
        ColumnFacts(
            number=SHOP.names.index(name) + 1, nullable=True, default=None, fast_default=None, definition_version=1
        )
        for name in names
    )
    stored = StorageFacts(relation=SHOP.relation or 0, name="public.things", file=5, attached=False)
    return CatalogueFacts(columns=columns, storage=(stored,), columns_ever=len(SHOP.names))


FULL = replace(SHOP, facts=facts_of(*SHOP.names))
NARROW = replace(
    SHOP, columns=tuple(column for column in SHOP.columns if column.name != "name"), facts=facts_of("id", "big", "n")
)
"""`FULL` and `NARROW` are the same table before and after a column was dropped."""


class Quiet:
    """One pipeline of one table, whose source never answers."""

    def __init__(self, folder: Path, *, on_bad_row: str = "stop", spec: str = "", table_format: str = "delta") -> None:
        self.file = folder / "tailrace.yaml"
        folder.mkdir(parents=True, exist_ok=True)
        text = SETTINGS.format(format=table_format, on_bad_row=on_bad_row, form=f", {spec}" if spec else "")
        self.file.write_text(text)
        self.diary = Diary(folder / "log")

    @property
    def settings(self) -> PipelineSettings:
        return load_settings(self.file)

    @property
    def table(self) -> DeltaRsTable:
        assert self.location.catalog is None
        return self.location.open()

    @property
    def location(self) -> TableLocation:
        return self.settings.tables.layout.location(THINGS, ChangeLog.open(self.settings.log.path).log_id)

    @property
    def applied_position(self) -> AppliedPosition:
        position = self.location.open_for_reading().applied_position()
        assert position is not None
        return position

    def load(self, rows: Sequence[dict[str, Any]] = (), schema: TableSchema = SHOP) -> None:
        """Commit a load that read these rows, at the start of the log."""
        self.diary.commit()
        registry = self.registry()
        position = registry.index.position
        table = self.table if self.location.catalog is None else iceberg_table(self.location)
        table.load(schema, record_batches(schema, rows), registry.applied_position_at(position))

    def reload(
        self,
        rows: Sequence[dict[str, Any]],
        name: str,
        schema: TableSchema = SHOP,
        *,
        ahead_until: Lsn | None = None,
        dead_letters: Sequence[DeadLetterBatch] = (),
    ) -> None:
        """Commit a load that read these rows, at the end of the log.

        With `ahead_until`, some rows are as they were at that later position. `dead_letters` are rows it rejected.
        """
        registry = self.registry()
        position = registry.index.position
        applied = replace(registry.applied_position_at(position), load=name)
        path = self.settings.log.path
        LoadStore(path).folder(name).mkdir(parents=True, exist_ok=True)
        LoadStore(path).record_commit(name, ahead_until or position)
        current, store = self.location.open_for_reading().applied_position(), DeadLetterStore(path, THINGS)
        store.before_load(name, whole=True, now=current.load if current else None, seq=applied.seq)
        if dead_letters:
            store.write_load_rejects(name, applied.seq, dead_letters)
        if self.location.catalog is None:
            self.table.load(schema, record_batches(schema, rows), applied)
        else:
            self._commit_iceberg_load(schema, rows, applied)

    def _commit_iceberg_load(
        self, schema: TableSchema, rows: Sequence[dict[str, Any]], applied: AppliedPosition
    ) -> None:
        """Stage rows as a load's task does, and commit them to an Iceberg table."""
        location, name = self.location, applied.load or ""
        origin = LoadOrigin(seq=applied.seq, position=str(applied.position), read_at=time.time_ns() // 1000)
        rows_with_metadata = with_added_columns(location.spec, schema, record_batches(schema, rows), origin)
        stored, partition_by = location.spec.stored_schema(schema), location.spec.partition_by
        files = stage(location.staging, f"{name}-000000", stored, rows_with_metadata, partition_by, numbered=True)
        staged = StagedChunk(
            chunk=0,
            files=files,
            keys=(),
            rows=len(rows),
            bytes=0,
            seconds=0.0,
            seen_until=applied.position,
            dead_letters=0,
        )
        LoadStore(self.settings.log.path).record_chunk(name, staged)
        iceberg_table(location).commit_load(schema, files, applied, origin=origin)

    def keep(self, name: str) -> LoadKeeper:
        """Keep a load, as the pipeline does after the load commit."""
        keeper = self.load_keeper()
        keeper.keep(self.registry().add(THINGS), name)
        return keeper

    def load_keeper(self) -> LoadKeeper:
        tables = self.settings.tables
        return LoadKeeper(tables.keep_seed, tables.layout, self.registry())

    def commit(self, *rows: Change, schema: TableSchema = SHOP) -> Lsn:
        """Append one commit to the log; return its end."""
        self.diary.commit((schema, list(rows)))
        return self.diary.writer.position

    def commit_two(self, first: Sequence[Change], second: Sequence[Change]) -> tuple[Lsn, Lsn]:
        """Append one commit of two transactions; return the end of each."""
        begin = self.diary.writer.position.value
        ends = Lsn(begin + STEP // 2), Lsn(begin + STEP)
        (batch,) = self.diary._batches([(SHOP, [*first, *second])], "")
        index = batch.data.schema.get_field_index(change.POSITION)
        texts = [str(ends[0])] * len(first) + [str(ends[1])] * len(second)
        data = batch.data.set_column(index, batch.data.schema.field(index), pa.array(texts))
        self.diary.writer.append(window(begin, begin + STEP, replace(batch, data=data), transactions=2))
        return ends

    def registry(self) -> TableRegistry:
        settings = self.settings
        registry = TableRegistry(ChangeLog.open(settings.log.path), settings.tables.layout, settings.tables.policies_of)
        registry.refresh_index()
        return registry

    def apply(self, to: int | None = None) -> list[Outcome]:
        """Apply the log up to a commit, or to its end."""
        return apply(self.settings, to)

    def apply_killed(self, failpoint: str, hits: Path) -> int:
        """Apply the log in a process that dies at a failpoint; return its exit code."""
        return subprocess.run(
            [sys.executable, "-m", "tests.support.quiet", str(self.file)],
            check=False,
            start_new_session=True,
            env={**os.environ, "TAILRACE_FAILPOINT": failpoint, "TAILRACE_FAILPOINT_LOG": str(hits)},
        ).returncode

    def content(self) -> list[dict[str, Any]]:
        """Return the lake table's rows."""
        path = self.settings.tables.layout.path(THINGS)
        if self.location.catalog is not None:
            rows: list[dict[str, Any]] = rows_of(path).to_pylist()
            return rows
        return [row for file in self.table.files() for row in pq.read_table(path / file).to_pylist()]

    def rows(self) -> dict[int, dict[str, Any]]:
        """Return the lake table's rows by key."""
        rows = self.content()
        assert len({row["id"] for row in rows}) == len(rows), "each key is in one row"
        return {row["id"]: row for row in rows}

    def ns(self) -> dict[int, Any]:
        """Return the value of `n` in each row, by key."""
        return {key: row["n"] for key, row in sorted(self.rows().items())}


def apply(settings: PipelineSettings, to: int | None = None) -> list[Outcome]:
    log = ChangeLog.open(settings.log.path)
    registry = TableRegistry(log, settings.tables.layout, settings.tables.policies_of)
    newest = registry.refresh_index()
    end = newest if to is None else to
    managed = registry.add(THINGS)
    outcomes: list[Outcome] = []
    lease = LogLease(log.path, APPLIER_LEASE)
    try:
        while (apply_range := registry.next_range(managed, end)) is not None:
            assert managed.applied_position is not None
            assert managed.schema is not None
            work: ApplyWork | EvolveWork = ApplyWork(
                table=THINGS,
                log=log.path,
                location=managed.location,
                slices=apply_range.slices,
                schema=managed.schema,
                expected=managed.applied_position,
                position_after=apply_range.position_after,
                dead_letters_enabled=settings.tables.dead_letters_enabled(THINGS),
            )
            if apply_range.recast is not None:
                work = EvolveWork(
                    table=THINGS,
                    location=managed.location,
                    recast=apply_range.recast,
                    expected=managed.applied_position,
                )
            outcome = _advanced(work)
            outcomes.append(outcome)
            if outcome.error is not None:
                break
            assert outcome.applied_position is not None
            assert outcome.schema is not None
            managed.record_commit(outcome.applied_position, outcome.schema)
    finally:
        lease.release()
    return outcomes


def _advanced(work: ApplyWork | EvolveWork) -> Outcome:
    """Run the work with the engine under test; Iceberg's connector writes no Delta tables."""
    if not IS_SPARK or (IS_ICEBERG and work.location.catalog is None):
        return advance_table(work)
    (outcome,) = spark_engine().run(advance_table, [work])
    return outcome


if __name__ == "__main__":
    apply(load_settings(sys.argv[1]))
