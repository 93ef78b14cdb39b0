"""The schema history in files: nothing is guessed, and only retention removes versions."""

from __future__ import annotations

import json
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest

from tailrace.errors import ConfigError, StateBusy, StateCorrupt, StateFull, StateTrimmed
from tailrace.model.catalogue_facts import CatalogueFacts, ColumnFacts, StorageFacts
from tailrace.model.evolution import SchemaChangeKind
from tailrace.model.position import Lsn
from tailrace.model.schema import Column, TableId, TableSchema
from tailrace.state.schema_history import KEEP_LAST, MemorySchemaHistory, Retention, SchemaEvent, SchemaHistory
from tailrace.state.schema_history_stores import FileSchemaHistory
from tailrace.storage import records
from tests.support.changes import SHOP
from tests.support.disks import fill, mounted
from tests.support.logs import quick_folder

FIXTURE = Path(__file__).parents[2] / "fixtures" / "state-format-1"
NOW = datetime.now(UTC)


def wider(extra: int, like: TableSchema = SHOP) -> TableSchema:
    """Return the table with so many more columns."""
    more = tuple(Column(name=f"x{n}", source_type="int", type=pa.int32()) for n in range(extra))
    return replace(like, columns=(*like.columns, *more))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with quick_folder(tmp_path) as found:
        yield found / "schemas"


def numbers(history: SchemaHistory) -> list[int]:
    return [version.version for version in history.versions(SHOP.table)]


# --- retention ---------------------------------------------------------------------------------------------


def test_256_versions_are_kept_by_default(folder: Path) -> None:
    with FileSchemaHistory(folder) as history:
        for n in range(KEEP_LAST + 2):
            history.record(wider(n % 2))
        assert KEEP_LAST == 256
        assert numbers(history) == list(range(3, KEEP_LAST + 3))
    assert len(list(folder.glob("*.json"))) == KEEP_LAST + 1, "and the record of who owns it"
    with FileSchemaHistory(folder, retention=Retention(keep_last=2)) as history:
        assert numbers(history) == [KEEP_LAST + 1, KEEP_LAST + 2], "a start keeps no more than it was told to"


@pytest.mark.parametrize("kind", ["memory", "files"])
def test_a_version_is_removed_once_its_successor_is_older_than_the_limit(kind: str, folder: Path) -> None:
    by_age = Retention(keep_last=None, max_age=timedelta(days=30))
    history = MemorySchemaHistory(retention=by_age) if kind == "memory" else FileSchemaHistory(folder, retention=by_age)
    for n, days in enumerate((90, 60, 20, 1)):
        history.record(wider(n), time=NOW - timedelta(days=days))
    assert numbers(history) == [2, 3, 4], "the second was in force 30 days ago"
    in_force = history.at_time(SHOP.table, NOW - timedelta(days=29))
    assert in_force is not None
    assert in_force.version == 2
    with pytest.raises(StateTrimmed) as caught:
        history.at_time(SHOP.table, NOW - timedelta(days=80))
    assert "Retention" in caught.value.hint


def test_the_newest_is_kept_however_old_it_is(folder: Path) -> None:
    retention = Retention(keep_last=1, max_age=timedelta(0))
    with FileSchemaHistory(folder, retention=retention) as history:
        history.record(SHOP, time=NOW - timedelta(days=900))
        history.drop(SHOP.table, time=NOW - timedelta(days=800))
    with FileSchemaHistory(folder, retention=retention) as history:
        latest = history.latest(SHOP.table)
        assert latest is not None
        assert (latest.version, latest.event) == (2, SchemaEvent.DROP)


def test_without_a_retention_everything_is_kept() -> None:
    history = MemorySchemaHistory(retention=None)
    for n in range(300):
        history.record(wider(n % 2))
    assert len(numbers(history)) == 300


def test_an_invalid_retention_is_refused() -> None:
    refused: list[dict[str, Any]] = [{"keep_last": None}, {"keep_last": 0}, {"max_age": timedelta(-1)}]
    for given in refused:
        with pytest.raises(ConfigError) as caught:
            Retention(**given)
        assert caught.value.hint


# --- what changed --------------------------------------------------------------------------------------------


def facts(*columns: tuple[int, str | None], made: int, file: int = 1) -> CatalogueFacts:
    return CatalogueFacts(
        columns=tuple(
            ColumnFacts(number=number, nullable=True, default=default, fast_default=default, definition_version=number)
            for number, default in columns
        ),
        storage=(StorageFacts(relation=1, name="things", file=file, attached=False),),
        columns_ever=made,
    )


def test_catalogue_facts_survive_a_restart_and_prove_a_rename(folder: Path) -> None:
    old = replace(SHOP, facts=facts((1, None), (2, None), (3, None), (4, None), made=4))
    renamed = replace(SHOP, columns=(*SHOP.columns[:3], replace(SHOP.columns[3], name="count")), facts=old.facts)
    with FileSchemaHistory(folder) as history:
        history.record(old)
    with FileSchemaHistory(folder) as history:
        made = history.record(renamed)
        assert made.evolution is not None
        assert [(change.kind, change.old, change.new) for change in made.evolution.changes] == [
            (SchemaChangeKind.RENAME, "n", "count")
        ]
        assert made.evolution.rewritten is False
        assert history.at_version(SHOP.table, 1).schema.facts == old.facts


def test_a_later_alter_is_not_blamed_for_an_earlier_truncate() -> None:
    first = facts((1, None), (2, None), (3, None), (4, None), made=4)
    history = MemorySchemaHistory()
    history.record(replace(SHOP, facts=first))
    truncated = replace(first, storage=(replace(first.storage[0], file=2),))
    assert history.record(replace(SHOP, facts=truncated)).version == 1, "another file alone proves nothing"
    wide = facts((1, None), (2, None), (3, None), (4, None), (5, None), made=5, file=2)
    made = history.record(replace(wider(1), facts=wide))
    assert made.evolution is not None
    assert made.evolution.rewritten is False


def test_two_tables_that_swap_their_names_are_recorded(folder: Path) -> None:
    one, other = TableId("public", "one"), TableId("public", "other")
    a, b = replace(SHOP, table=one, relation=1), replace(wider(1), table=other, relation=2)
    with FileSchemaHistory(folder) as history:
        history.record(a)
        history.record(b)
        history.record(replace(b, table=one))
        history.record(replace(a, table=other))
        events = {
            table.name: [version.event.value for version in history.versions(table)] for table in history.tables()
        }
        assert events == {"one": ["create", "drop", "alter"], "other": ["create", "drop", "create"]}
        kept = {table: history.versions(table) for table in history.tables()}
    with FileSchemaHistory(folder) as history:
        assert {table: history.versions(table) for table in history.tables()} == kept
        assert history.record(replace(a, table=other)) == kept[other][-1]
        third = history.record(replace(b, table=TableId("public", "third")))
        assert third.event is SchemaEvent.ALTER, "whose number it was is known after a restart"


def test_a_rename_cut_off_between_its_two_records_is_finished_by_the_next_start(folder: Path) -> None:
    sold = TableId("public", "sold")
    with FileSchemaHistory(folder) as history:
        history.record(SHOP)
        history.record(replace(SHOP, table=sold))
    (new,) = [path for path in folder.glob("*.1.json") if '"event": "alter"' in path.read_text()]
    new.unlink()
    with FileSchemaHistory(folder) as history:
        made = history.record(replace(SHOP, table=sold))
        assert made.event is SchemaEvent.ALTER
        assert [version.event for version in history.versions(SHOP.table)] == [SchemaEvent.CREATE, SchemaEvent.DROP]


def test_any_name_a_table_can_have_is_kept(folder: Path) -> None:
    names = ["../../etc/passwd", "a/b", "x" * 300, "", ".", "Ünï\n", "A", "a", "'; drop"]
    with FileSchemaHistory(folder) as history:
        for relation, name in enumerate(names, start=1):
            history.record(replace(SHOP, table=TableId("public", name), relation=relation))
    assert {path.parent for path in folder.rglob("*")} == {folder}
    with FileSchemaHistory(folder, read_only=True) as history:
        assert sorted(table.name for table in history.tables()) == sorted(names)


# --- the files -----------------------------------------------------------------------------------------------


def test_files_of_format_1_are_read() -> None:
    history = FileSchemaHistory(FIXTURE / "schemas", read_only=True)
    table = TableId("public", "örders")
    made, changed, gone = history.versions(table)
    assert [version.event.value for version in (made, changed, gone)] == ["create", "alter", "drop"]
    assert (changed.ddl, changed.position) == ("ALTER TABLE orders ADD total numeric(12,2)", Lsn(9))
    assert changed.schema.columns[1].type == pa.decimal128(12, 2)
    assert changed.evolution is not None
    assert [change.kind for change in changed.evolution.changes] == [SchemaChangeKind.ADD]
    assert history.at_time(table, datetime(2026, 11, 16, 13, 30, tzinfo=UTC)) == changed


@pytest.fixture
def kept(folder: Path) -> list[Path]:
    """Return the files of three versions."""
    with FileSchemaHistory(folder) as history:
        for n in range(3):
            history.record(wider(n))
    files = sorted(folder.glob("*.json"))[-3:]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    return files


def changed_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def torn(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


def of_another_place(file: Path) -> None:
    shutil.copy(file.with_name(file.name.replace(".2.", ".1.")), file)


def of_a_newer_format(file: Path) -> None:
    stored = json.loads(file.read_text())
    del stored["sha256"]
    file.write_bytes(records.encode_state(stored | {"format": 2}))


def whole_and_without_sense(file: Path) -> None:
    stored = json.loads(file.read_text())
    del stored["sha256"]
    stored["shape"]["arrow"] = "AAAA"
    file.write_bytes(records.encode_state(stored))


def linked(file: Path) -> None:
    file.rename(file.with_suffix(".moved"))
    file.symlink_to(file.with_suffix(".moved"))


DAMAGE: list[Callable[[Path], None]] = [
    changed_byte, torn, of_another_place, of_a_newer_format, whole_and_without_sense, linked, Path.unlink,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_or_missing_file_is_an_error_and_is_never_repaired_silently(
    kept: list[Path], damage: Callable[[Path], None]
) -> None:
    damage(kept[1])
    for read_only in (True, False):
        with pytest.raises(StateCorrupt) as caught:
            FileSchemaHistory(kept[1].parent, read_only=read_only)
        assert caught.value.fields["path"] == kept[1]
        assert "Restore the file" in caught.value.hint
    with pytest.raises(StateCorrupt):  # and not: busy, for whoever failed to open it holds nothing
        FileSchemaHistory(kept[1].parent)


def test_a_full_disk_stores_no_version_and_loses_none(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=512k", "tmpfs") as disk:
        with FileSchemaHistory(disk / "schemas") as history:
            history.record(SHOP)
            filler = fill(disk)
            with pytest.raises(StateFull):
                history.record(wider(200))
            assert numbers(history) == [1]
            filler.unlink()
            assert history.record(wider(200)).version == 2
        with FileSchemaHistory(disk / "schemas") as history:
            assert numbers(history) == [1, 2]


def test_one_process_writes_while_others_read(folder: Path) -> None:
    with FileSchemaHistory(folder) as history:
        history.record(SHOP)
        reader = FileSchemaHistory(folder, read_only=True)
        with pytest.raises(StateBusy):
            FileSchemaHistory(folder)
        history.record(wider(1))
        assert numbers(reader) == [1, 2]
        with pytest.raises(ConfigError, match="read-only"):
            reader.record(wider(2))
    with pytest.raises(ConfigError, match="closed"):
        history.record(wider(2))


def test_times_without_a_zone_are_refused() -> None:
    history, zoneless = MemorySchemaHistory(), NOW.replace(tzinfo=None)
    with pytest.raises(ConfigError, match="zone"):
        history.record(SHOP, time=zoneless)
    history.record(SHOP)
    with pytest.raises(ConfigError, match="zone"):
        history.at_time(SHOP.table, zoneless)


@pytest.mark.parametrize("ask", [
    lambda history: history.latest("public.orders"), lambda history: history.versions(None),
    lambda history: history.at_version("public.orders", 1), lambda history: history.at_version(SHOP.table, "1"),
    lambda history: history.at_time(SHOP.table, "now"), lambda history: history.at_time(SHOP.table, None),
    lambda history: history.drop("public.orders"), lambda history: history.record(SHOP.table),
    lambda history: history.record(SHOP, time="now"), lambda history: history.record(SHOP, position="0/7"),
    lambda history: history.record(SHOP, ddl=3), lambda _: Retention(keep_last=cast("int", "3")),
    lambda _: Retention(keep_last=True), lambda _: Retention(max_age=cast("timedelta", 3)),
    lambda _: MemorySchemaHistory(retention=cast("Retention", 3)),
])  # fmt: skip
def test_a_wrong_query_is_refused_and_not_answered_as_unknown(ask: Callable[[Any], object]) -> None:
    history = MemorySchemaHistory()
    history.record(replace(SHOP, table=TableId("public", "other")))
    with pytest.raises(ConfigError) as raised:
        ask(history)
    assert raised.value.hint
    assert history.tables() == (TableId("public", "other"),)
