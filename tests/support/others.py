"""What others do to a lake table, with the tools of its format: they write to it, look after it, have one of their own,
or spoil it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake

from tailrace.tables.delta.commit_log import file_names
from tailrace.tables.iceberg.catalogs import local_path
from tests.support.engines import IS_ICEBERG, history_of, metadata_file, metadata_of, others_session

Act = Callable[[Path], None]
"""On the table in a folder."""


def run_sql(folder: Path, statement: str) -> None:
    """A statement on an Iceberg table, in a session of theirs: `{t}` is the table, `{c}` its catalog, and `{n}` how the
    catalog's procedures call it."""
    spark, catalog = others_session(folder)
    inside = f"`{folder.parent.name}`.`{folder.name}`"
    spark.sql(statement.format(t=f"{catalog}.{inside}", c=catalog, n=inside))


def append(folder: Path) -> None:
    """Each row once more."""
    if IS_ICEBERG:
        run_sql(folder, "INSERT INTO {t} SELECT * FROM {t}")
        return
    write_deltalake(str(folder), pa.table(DeltaTable(str(folder)).scan()), mode="append")


def restore(folder: Path) -> None:
    """Of Delta tables; who sets an Iceberg table back sets back its position, too."""
    DeltaTable(str(folder)).restore(0)


def compact(folder: Path) -> None:
    if IS_ICEBERG:
        run_sql(folder, "CALL {c}.system.rewrite_data_files(table => '{n}', options => map('rewrite-all', 'true'))")
        return
    DeltaTable(str(folder)).optimize.compact()


def rewrite_manifests(folder: Path) -> None:
    """Of Iceberg tables."""
    run_sql(folder, "CALL {c}.system.rewrite_manifests('{n}')")


def vacuum(folder: Path) -> None:
    """Remove what only older versions have. An Iceberg table forgets those, which is no version of its own."""
    if IS_ICEBERG:
        run_sql(folder, "CALL {c}.system.expire_snapshots(table => '{n}', older_than => now(), retain_last => 1)")
        return
    DeltaTable(str(folder)).vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)


def make_table(folder: Path) -> None:
    """One of theirs."""
    if IS_ICEBERG:
        run_sql(folder, "CREATE NAMESPACE IF NOT EXISTS {c}.`" + folder.parent.name + "`")
        run_sql(folder, "CREATE TABLE {t} USING iceberg AS SELECT 1 AS a")
        return
    write_deltalake(str(folder), pa.table({"a": pa.array([1], pa.int32())}))


WRITES: tuple[Act, ...] = (append,) if IS_ICEBERG else (append, restore)
"""What stops a table of ours."""
MAINTENANCE: tuple[Act, ...] = (vacuum, compact, rewrite_manifests) if IS_ICEBERG else (compact, vacuum, vacuum)
"""What does not, in this order: an Iceberg table must not forget the newest snapshot of ours."""
COMMITS: tuple[Act, ...] = (append, compact if IS_ICEBERG else vacuum)
"""What makes another version of the table, of each kind."""


# --- what a table is, for those who spoil it, or look for it on a disk ---------------------------------------


def positions_in(folder: Path) -> list[dict[str, Any] | None]:
    """What each commit says of our position, from the first; None if it says nothing."""
    if IS_ICEBERG:
        found = metadata_of(folder)
        summaries = {item["snapshot-id"]: item["summary"] for item in found.document["snapshots"]}
        told = [summaries[number].get("tailrace") for number in history_of(found)]
        return [None if text is None else json.loads(text) for text in told]
    return [_position_in(file) for file in sorted((folder / "_delta_log").glob("*.json"))]


def _position_in(file: Path) -> dict[str, Any] | None:
    actions = [json.loads(line) for line in file.read_text().splitlines()]
    info = next(action["commitInfo"] for action in actions if "commitInfo" in action)
    told = info if "tailrace" in info else json.loads(info.get("userMetadata") or "{}")  # as Spark's connector has it
    if "tailrace" not in told:
        return None
    stored: dict[str, Any] = json.loads(told["tailrace"])
    (txn,) = [action["txn"] for action in actions if "txn" in action]
    assert (txn["appId"], txn["version"]) == (f"tailrace/{stored['log']}", stored["seq"])
    return stored


def commit_file(folder: Path) -> Path:
    """What the newest commit wrote last, and readers look for first."""
    if IS_ICEBERG:
        return metadata_file(folder)
    return max((folder / "_delta_log").glob("*.json"))


def disown(folder: Path) -> None:
    """Have the newest commit, which is somebody's, call itself one that changes no rows."""
    file = commit_file(folder)
    said, other = ('"operation":"append"', '"operation":"replace"') if IS_ICEBERG else ('"WRITE"', '"OPTIMIZE"')
    _change(file, said, other)


def garble(folder: Path) -> None:
    """Have the newest commit, which is ours, say its position in another way."""
    _change(commit_file(folder), "seq\\", "sqe\\")


def _change(file: Path, text: str, other: str) -> None:
    said = file.read_text()
    at = said.rindex(text)
    file.write_text(said[:at] + other + said[at + len(text) :])
    file.with_name(f".{file.name}.crc").unlink(missing_ok=True)  # Hadoop's, which would tell


def parts_of(folder: Path) -> list[Path]:
    """All files of the newest version of a table, and the folders that list these, as far as its own."""
    if IS_ICEBERG:
        from pyiceberg.table import StaticTable

        table = StaticTable.from_metadata(str(commit_file(folder)))
        snapshot = table.current_snapshot()
        assert snapshot is not None
        manifests = [manifest.manifest_path for manifest in snapshot.manifests(table.io)]
        named = [*table.inspect.files()["file_path"].to_pylist(), *manifests, snapshot.manifest_list]
        files = [commit_file(folder), *map(local_path, named)]
    else:
        files = [commit_file(folder), *(folder / name for name in file_names(DeltaTable(str(folder))))]
    return [*files, *{parent for file in files for parent in file.parents if parent.is_relative_to(folder)}]
