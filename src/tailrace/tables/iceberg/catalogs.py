"""Where an Iceberg table's newest metadata is found: a folder of numbered files, or a catalog that says it.

A catalog is named in settings, and is plain data: Spark may send it to its workers. What a table's commits say is
read here without Java, so that a command or the start of a pipeline needs no Spark to know where a table stands.
Commits are made by the connector (`spark/writers/iceberg_commits.py`). The tables themselves lie below one folder,
whichever catalog lists them."""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psycopg

from tailrace.errors import TableUnusable
from tailrace.tables.iceberg.rest_catalog import ANSWER_SECONDS_MAX, Unanswered, load_table
from tailrace.tables.table_folder import unreadable
from tailrace.tables.table_paths import UNUSABLE

CatalogKind = Literal["hadoop", "rest", "jdbc"]

VERSIONS_MAX = 1_000_000
"""That a folder's hint may lie behind."""

_CODECS = (".metadata.json", ".gz.metadata.json", ".metadata.json.gz")
_NUMBERED = re.compile(r"v(\d+)(?:\.metadata\.json|\.gz\.metadata\.json|\.metadata\.json\.gz)")


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """Where the Iceberg tables of one pipeline are listed."""

    kind: CatalogKind
    root: Path
    """The folder below which they lie."""
    uri: str = field(default="", repr=False)
    warehouse: str = ""
    """As a REST catalog calls it."""
    properties: Mapping[str, str] = field(default_factory=dict, repr=False)
    """For the connector's catalog, as they are; credentials are among them."""
    version: Literal[2, 3] = 2
    """Iceberg's format version of tables that are made."""

    def levels(self, path: Path) -> tuple[str, ...]:
        """A table's name, after the levels of its namespace, from where it lies."""
        names = path.relative_to(self.root.absolute()).parts
        if len(names) < 2 or any(UNUSABLE.search(name) or ":" in name for name in names):
            raise TableUnusable(
                "an Iceberg table cannot have this name",
                path=path,
                hint=r"Give it one of two parts, without [ ] \ ^ | : and percent signs: `name:` in `tables.rules`.",
            )
        return names

    def metadata(self, path: Path) -> dict[str, Any] | None:
        """What the newest commit of a table made of it; None if there is none."""
        ways: Mapping[str, Callable[[Path], dict[str, Any] | None]] = {
            "hadoop": self._in_folder,
            "rest": self._at_server,
            "jdbc": self._in_database,
        }
        try:
            found = ways[self.kind](path)
            if found is not None and "format-version" not in found:
                raise ValueError("not what Iceberg says of a table")
            return found
        except OSError as exc:
            raise unreadable(path, exc) from exc
        except (ValueError, KeyError, TypeError) as exc:
            raise TableUnusable(
                "the table's metadata cannot be read", path=path, hint="Is it an Iceberg table, and whole?"
            ) from exc

    # A folder.

    def _in_folder(self, path: Path) -> dict[str, Any] | None:
        self.levels(path)
        found = newest_file(path / "metadata")
        return None if found is None else read_metadata(found)

    # A database that Iceberg's JDBC catalog writes.

    def _in_database(self, path: Path) -> dict[str, Any] | None:
        *namespace, name = self.levels(path)
        asked = (SPARK_CATALOG, ".".join(namespace), name)
        try:
            found = self._ask_database(asked)
        except psycopg.Error as exc:
            # Its own words quote pieces of a URL that it cannot read, the password among them.
            raise self._silent(path, type(exc).__name__) from None
        except sqlite3.Error as exc:
            raise self._silent(path, type(exc).__name__) from exc
        if found is None:
            return None
        return read_metadata(local_path(found))

    def _ask_database(self, asked: tuple[str, str, str]) -> str | None:
        sql = (
            "select metadata_location from iceberg_tables"
            " where catalog_name = {0} and table_namespace = {0} and table_name = {0}"
        )
        if self.uri.startswith("jdbc:sqlite:"):
            file = local_path(self.uri.removeprefix("jdbc:sqlite:"))
            if not file.exists():
                return None
            with contextlib.closing(sqlite3.connect(file, timeout=ANSWER_SECONDS_MAX)) as lite:
                if not lite.execute("select 1 from sqlite_master where name = 'iceberg_tables'").fetchone():
                    return None
                row = lite.execute(sql.format("?"), asked).fetchone()
        else:
            given = {name: value for name in ("user", "password") if (value := self.properties.get(f"jdbc.{name}"))}
            url, seconds = self.uri.removeprefix("jdbc:"), int(ANSWER_SECONDS_MAX)
            with psycopg.connect(url, connect_timeout=seconds, autocommit=True, **given) as server:  # type: ignore[arg-type] # the rest are texts
                there = server.execute("select to_regclass('iceberg_tables') is not null").fetchone()
                if there is None or not there[0]:
                    return None
                row = server.execute(sql.format("%s").encode(), asked).fetchone()
        return None if row is None else str(row[0])

    # A server that speaks REST.

    def _at_server(self, path: Path) -> dict[str, Any] | None:
        *namespace, name = self.levels(path)
        try:
            found = load_table(self.uri, self.warehouse, self.properties, namespace, name)
        except Unanswered as exc:
            raise self._silent(path, exc.reason) from exc
        return None if found is None else dict(found["metadata"])

    def _silent(self, path: Path, reason: str) -> TableUnusable:
        return TableUnusable(
            "the Iceberg catalog does not say where the table is",
            path=path,
            catalog=self.kind,
            reason=reason,
            hint="Is it up, and are `uri` and what it asks for in `tables.catalog` right?",
        )


SPARK_CATALOG = "tailrace"
"""What our catalog is called in Spark, and in the rows of a JDBC catalog."""


def newest_file(folder: Path) -> Path | None:
    """The metadata of a table that no catalog lists, by the highest number; None if there is none."""
    number = _hinted(folder)
    if number is None:
        numbers = [int(said[1]) for entry in _entries(folder) if (said := _NUMBERED.fullmatch(entry))]
        return _numbered(folder, max(numbers)) if numbers else None
    # The hint is written after the commit, so commits may be ahead of it.
    found = _numbered(folder, number)
    for following in range(number + 1, number + VERSIONS_MAX):
        newer = _numbered(folder, following)
        if newer is None:
            break
        found = newer
    return found


def _hinted(folder: Path) -> int | None:
    try:
        number = int((folder / "version-hint.text").read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return number if _numbered(folder, number) is not None else None


def _entries(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in folder.iterdir()]
    except FileNotFoundError:
        return []


def _numbered(folder: Path, number: int) -> Path | None:
    files = (folder / f"v{number}{ending}" for ending in _CODECS)
    return next((file for file in files if file.exists()), None)


def local_path(location: str) -> Path:
    """A file of this machine, from what Iceberg says."""
    path = re.sub(r"^file:(//(?=/))?", "", location)  # never percent-encoded
    if not path.startswith("/"):
        raise ValueError("not on this file system")
    return Path(path)


def read_metadata(file: Path) -> dict[str, Any]:
    """One metadata file."""
    content = file.read_bytes()
    if content.startswith(b"\x1f\x8b"):
        content = gzip.decompress(content)
    return dict(json.loads(content))
