"""The stored format is a contract: a log of format 1 stays readable for ever.

`tests/fixtures/log-format-1` was written once by `write_fixture` below and is never written again; `expected.json` has
its rows. A reader written from docs/reference/log-format.md alone tests that page.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tailrace.changelog.maintain.retention import RetentionPolicy, trim
from tailrace.changelog.maintain.sealer import Sealer
from tailrace.changelog.read.consumers import read_holds
from tailrace.changelog.read.reader import ChangeLog
from tailrace.changelog.write.writer import LogWriter
from tailrace.errors import LogTrimmed
from tailrace.model.schema import Column, TableSchema
from tests.support.changes import KEYLESS, SHOP, delete, insert, move, truncate, update
from tests.support.stranger import Stranger
from tests.support.windows import SOURCE, batch, finishing_window, named, open_window, window

FIXTURE = Path(__file__).parents[3] / "fixtures" / "log-format-1"

WIDER = replace(SHOP, columns=(*SHOP.columns, Column(name="_op", source_type="date", type=pa.date32())))
OTHER: TableSchema = replace(named("strange schema", 'quo"ted.näme', 99, like=KEYLESS))


def write_fixture(folder: Path) -> None:
    """Write a log with every kind of file and odd names.

    It is trimmed, sealed and merged, with large and fresh commits and two schema versions.
    """
    writer = LogWriter(folder, SOURCE)
    writer.append(window(0, 100))
    writer.append(window(100, 200, batch(SHOP, insert(1, name="first"), insert(2, name="gone with the trim"))))
    with Sealer(folder) as sealer:
        sealer.seal()
        trim(sealer, RetentionPolicy(age_seconds=0.0), now=4e9)
    at = 200
    for key in range(8):
        old = {"id": key, "name": "was", "big": None, "n": 1}
        writer.append(
            window(
                at,
                at + 100,
                batch(
                    SHOP,
                    insert(10 + key, name=f"näme {key}", big="x" * 50, n=key),
                    update(10 + key, unchanged=("big",), n=7),
                    *move(10 + key, 100 + key, unchanged=("big",)),
                    update(key, before=old, n=2, unfit=("name",)),
                ),
                batch(OTHER, insert({"a": key}, b=None), first=5),
            )
        )
        at += 100
        with Sealer(folder) as sealer:
            sealer.seal()
    with Sealer(folder) as sealer:
        sealer.merge_seals()
        sealer.clean(0)
    writer.append(open_window(at, batch(SHOP, insert(1000), insert(1001)), batch(WIDER, insert(1002), first=2)))
    writer.append(open_window(at, batch(WIDER, insert(1003)), continues=True))
    writer.append(finishing_window(at, at + 200, batch(WIDER, delete(1003)), continued_end=at + 100))
    writer.append(window(at + 200, at + 300, batch(WIDER, truncate(), insert(2000, n=None))))
    writer.close()
    list(ChangeLog.open(folder).follow(table=str(SHOP.table), consumer="reader"))
    for path in (*folder.glob("*.lock"), *folder.glob("owner*"), *folder.glob("sealer*"), *folder.glob("fence*")):
        path.unlink(missing_ok=True)
    shutil.rmtree(folder / "status")


def rows_of(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Every row by table, values as text where JSON has no type for them."""
    log = ChangeLog.open(folder)
    log.schemas.load()
    found: dict[str, list[dict[str, Any]]] = {}
    for table in {str(version.schema.table) for version in log.schemas.latest()} | {"schema"}:
        rows = [row for batch in log.follow(table=table) for row in batch.with_all_columns().to_pylist()]
        found[table] = json.loads(json.dumps(rows, default=str))
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy, so that no test can change the fixture."""
    return Path(shutil.copytree(FIXTURE / "log", tmp_path / "log", symlinks=True))


def test_a_log_of_format_1_is_read_as_it_was_written(folder: Path) -> None:
    assert rows_of(folder) == json.loads((FIXTURE / "expected.json").read_text("utf-8"))


def test_a_reader_written_from_the_page_finds_the_same_rows(folder: Path) -> None:
    strange = Stranger(folder).rows()
    mine = rows_of(folder)
    assert strange.keys() == mine.keys()
    for table, rows in strange.items():
        plain = json.loads(json.dumps(rows, default=str))
        assert [{name: row[name] for name in row if name != "_commit"} for row in plain] == mine[table], table


def test_the_page_also_describes_a_log_written_today(tmp_path: Path) -> None:
    write_fixture(tmp_path / "log")
    strange, mine = Stranger(tmp_path / "log").rows(), rows_of(tmp_path / "log")
    assert {table: len(rows) for table, rows in strange.items()} == {table: len(rows) for table, rows in mine.items()}
    kept = json.loads((FIXTURE / "expected.json").read_text("utf-8"))
    assert {table: len(rows) for table, rows in kept.items()} == {table: len(rows) for table, rows in mine.items()}


def test_the_fixture_has_every_kind_of_file(folder: Path) -> None:
    log = ChangeLog.open(folder)
    log.seal_index.refresh()
    assert log.trimmed().commit > 0
    assert any(seal.level for seal in log.seal_index.seals)
    assert any(header.big for header in log.headers(log.seal_index.last_commit))
    assert (folder / "cold" / "1").is_symlink()
    assert [hold.name for hold in read_holds(folder)] == ["reader"]
    with pytest.raises(LogTrimmed):
        list(log.follow(0))


def test_an_older_log_accepts_new_commits(folder: Path) -> None:
    before = rows_of(folder)
    writer = LogWriter(folder, SOURCE)
    at = writer.position.value
    writer.append(window(at, at + 100, batch(WIDER, insert(3000))))
    writer.close()
    with Sealer(folder) as sealer:
        sealer.seal()
        sealer.clean(0)
    after = rows_of(folder)
    assert after[str(SHOP.table)][:-1] == before[str(SHOP.table)]
    assert after[str(SHOP.table)][-1]["id"] == 3000
