"""Find an Iceberg table's newest metadata. It is in a folder of numbered files, or known to a catalog.

A catalog is configured in the settings, and is plain data: Spark may send it to its workers. The metadata is read here
without Java, so a command or the start of a pipeline can find a table's position without Spark. Commits are made by the
connector (`spark/writers/iceberg_commits.py`). The tables themselves are below one folder, whichever catalog lists
them.
"""

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
"""Versions by which a folder's hint may be behind."""

_CODECS = (".metadata.json", ".gz.metadata.json", ".metadata.json.gz")
_NUMBERED = re.compile(r"v(\d+)(?:\.metadata\.json|\.gz\.metadata\.json|\.metadata\.json\.gz)")


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """The catalog of one pipeline's Iceberg tables."""

    kind: CatalogKind
    root: Path
    """The folder that has all the tables."""
    uri: str = field(default="", repr=False)
    warehouse: str = ""
    """The warehouse's name in a REST catalog."""
    properties: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Properties for the connector's catalog, unchanged; they include credentials."""
    version: Literal[2, 3] = 2
    """Iceberg's format version for new tables."""

    def levels(self, path: Path) -> tuple[str, ...]:
        """Return a table's name, with the levels of its namespace, from its folder."""
        names = path.relative_to(self.root.absolute()).parts
        if len(names) < 2 or any(UNUSABLE.search(name) or ":" in name for name in names):
            raise TableUnusable(
                "an Iceberg table cannot have this name",
                path=path,
                hint=r"Set a name of two parts, without [ ] \ ^ | : and percent signs: `name:` in `tables.rules`.",
            )
        return names

    def metadata(self, path: Path) -> dict[str, Any] | None:
        """Return the metadata of a table's newest commit; None without a table."""
        readers: Mapping[str, Callable[[Path], dict[str, Any] | None]] = {
            "hadoop": self._in_folder,
            "rest": self._at_server,
            "jdbc": self._in_database,
        }
        try:
            found = readers[self.kind](path)
            if found is not None and "format-version" not in found:
                raise ValueError("not an Iceberg table's metadata")
            return found
        except OSError as exc:
            raise unreadable(path, exc) from exc
        except (ValueError, KeyError, TypeError) as exc:
            raise TableUnusable(
                "the table's metadata cannot be read",
                path=path,
                hint="Check that it is an Iceberg table and that no file is missing.",
            ) from exc

    # A folder.

    def _in_folder(self, path: Path) -> dict[str, Any] | None:
        self.levels(path)
        found = newest_file(path / "metadata")
        return None if found is None else read_metadata(found)

    # A database that Iceberg's JDBC catalog writes.

    def _in_database(self, path: Path) -> dict[str, Any] | None:
        *namespace, name = self.levels(path)
        row_key = (SPARK_CATALOG, ".".join(namespace), name)
        try:
            location = self._metadata_location(row_key)
        except psycopg.Error as exc:
            # Its own message quotes parts of a URL that it cannot parse, including the password.
            raise self._unavailable(path, type(exc).__name__) from None
        except sqlite3.Error as exc:
            raise self._unavailable(path, type(exc).__name__) from exc
        if location is None:
            return None
        return read_metadata(local_path(location))

    def _metadata_location(self, row_key: tuple[str, str, str]) -> str | None:
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
                row = lite.execute(sql.format("?"), row_key).fetchone()
        else:
            credentials = {
                name: value for name in ("user", "password") if (value := self.properties.get(f"jdbc.{name}"))
            }
            url, seconds = self.uri.removeprefix("jdbc:"), int(ANSWER_SECONDS_MAX)
            with psycopg.connect(url, connect_timeout=seconds, autocommit=True, **credentials) as server:  # type: ignore[arg-type] # the rest are texts
                exists = server.execute("select to_regclass('iceberg_tables') is not null").fetchone()
                if exists is None or not exists[0]:
                    return None
                row = server.execute(sql.format("%s").encode(), row_key).fetchone()
        return None if row is None else str(row[0])

    # A server that speaks REST.

    def _at_server(self, path: Path) -> dict[str, Any] | None:
        *namespace, name = self.levels(path)
        try:
            found = load_table(self.uri, self.warehouse, self.properties, namespace, name)
        except Unanswered as exc:
            raise self._unavailable(path, exc.reason) from exc
        return None if found is None else dict(found["metadata"])

    def _unavailable(self, path: Path, reason: str) -> TableUnusable:
        return TableUnusable(
            "the Iceberg catalog cannot be read",
            path=path,
            catalog=self.kind,
            reason=reason,
            hint="Check that it is running, and that `uri` and the credentials in `tables.catalog` are right.",
        )


SPARK_CATALOG = "tailrace"
"""Our catalog's name in Spark, and in the rows of a JDBC catalog."""


def newest_file(folder: Path) -> Path | None:
    """Return the newest metadata file of a table that no catalog lists; None without any."""
    number = _hinted(folder)
    if number is None:
        numbers = [int(match[1]) for entry in _entries(folder) if (match := _NUMBERED.fullmatch(entry))]
        return _numbered(folder, max(numbers)) if numbers else None
    # The hint is written after the commit, so commits may be ahead of it.
    found = _numbered(folder, number)
    for next_number in range(number + 1, number + VERSIONS_MAX):
        newer = _numbered(folder, next_number)
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
    """Return the path of a local file from Iceberg's location."""
    path = re.sub(r"^file:(//(?=/))?", "", location)  # never percent-encoded
    if not path.startswith("/"):
        raise ValueError("not on this file system")
    return Path(path)


def read_metadata(file: Path) -> dict[str, Any]:
    """Read one metadata file."""
    content = file.read_bytes()
    if content.startswith(b"\x1f\x8b"):
        content = gzip.decompress(content)
    return dict(json.loads(content))
