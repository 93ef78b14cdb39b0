"""Store which tables the log knows, and every version of their schemas.

A version is written before its first row. A table's number is never used again, and a version's file never changes. So
a row's (table, version) says for ever how to read it. The versions of all tables together are counted (`ordinal`), so
that the log can say which of them its `schema` stream has announced.

The log knows a table's schema from its first row on. For a captured table without rows, `<log>/expected/<id>.json` has
the schema that the capture last saw: when it started, or when the table was made. It serves readers that ask for the
columns of a quiet table. The table may have been altered since; its first row shows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import pyarrow as pa

from tailrace import failpoints
from tailrace.errors import NEW_LOG_HINT, ConfigError, LogCorrupt
from tailrace.model import change
from tailrace.model.catalogue_facts import CatalogueFacts
from tailrace.model.evolution import compare_schemas, same_version
from tailrace.model.schema import TableId, TableSchema, table_token
from tailrace.model.system_streams import SCHEMA_STREAM, SCHEMA_STREAM_NUMBER, SYSTEM_STREAMS, is_system
from tailrace.storage import files, records
from tailrace.storage.files import LogPath

FORMAT = 1
_RECORDED_MAX = 10_000
_IDENTITY_FIELDS = ("format", "table", "version", "ordinal")
"""Fields of a file that identify the version; the rest is its definition."""


@dataclass(frozen=True, kw_only=True)
class LogSchemaVersion:
    """One version of one table's schema, as the log numbers it."""

    table: int
    version: int
    schema: TableSchema
    arrow_schema: pa.Schema
    """The Arrow schema of a stored change, with every optional column."""
    ordinal: int = 0
    """The count over the versions of all tables, in the order they were made.

    It is 0 for a system stream.
    """
    definition: dict[str, Any] = field(compare=False, repr=False)
    """The stored JSON: the schema, and what changed in the table since the version before."""
    _stored: dict[tuple[str, ...], pa.Schema] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def required_column_count(self) -> int:
        """The least number of columns in a stored change."""
        return len(self.arrow_schema) - len(change.OPTIONAL)

    def stored_schema(self, without: tuple[str, ...]) -> pa.Schema:
        """Return the Arrow schema of a body that leaves these columns out."""
        if without not in self._stored:
            self._stored[without] = pa.schema([field for field in self.arrow_schema if field.name not in without])
        return self._stored[without]


class LogSchemas:
    """The log's `schemas` folder, with one writer and any number of readers.

    Readers find new files as they need them.
    """

    def __init__(self, folder: LogPath) -> None:
        self._folder = folder
        self._versions: dict[tuple[int, int], LogSchemaVersion] = {}
        self._tables: dict[int, int] = {}  # relation -> table
        self._latest: dict[int, LogSchemaVersion] = {}
        self._recorded: dict[int, tuple[TableSchema, LogSchemaVersion]] = {}  # by the schema's id()
        self._facts: dict[int, CatalogueFacts] = {}  # table -> newest facts of its latest version
        self._ordinal = 0
        self._version_count = 0
        self._numbers_by_name: tuple[int, dict[TableId | int, set[int]]] = (0, {})  # as of this count of versions

    def load(self) -> None:
        """Read all versions that were not read before; a version's file never changes."""
        known = {self._path(*key) for key in list(self._versions)}
        with files.explain_errors(self._folder):
            paths = files.matching_files(self._folder, "*/*.json")
        for path in paths:
            if path not in known and not path.name.startswith("."):
                self._remember(self._read(path))

    def make_durable(self, announced: int) -> None:
        """Make durable the versions that were recorded and not announced yet.

        Their writer may have died, or failed, before they were. No announced version may be missing: its number would
        be used again for another schema.
        """
        missing = set(range(1, announced + 1)) - {version.ordinal for version in self._all()}
        if missing:
            raise LogCorrupt(
                "a table's schema is missing",
                path=self._folder,
                ordinal=min(missing),
                hint=f"Restore the folder's files from a copy of the log. Without one: {NEW_LOG_HINT}",
            )
        for version in self._all():
            if version.ordinal > announced or not announced:
                path = self._path(version.table, version.version)
                with files.explain_errors(path):
                    files.make_durable(path)
                    files.sync_folder(self._folder)

    def get(self, table: int, version: int) -> LogSchemaVersion:
        """Return the version; its file exists since before its first row."""
        known = self._versions.get((table, version))
        if known is None:
            known = self._read(self._path(table, version))
            self._remember(known)
        return known

    def latest(self) -> list[LogSchemaVersion]:
        """Return the newest known version of every table of the source."""
        versions = [self._latest[table] for table in sorted(self._latest)]
        return [version for version in versions if not is_system(version.schema)]

    def current_numbers(self, table: TableId, relation: int | None) -> list[int]:
        """Return the numbers of source tables that now have this name or this relation.

        It is called for every table of a pipeline in every micro-batch, so it must not search all of them each time.
        """
        count, numbers = self._numbers_by_name
        if count != self._version_count:
            count, numbers = (
                self._version_count,
                {},
            )  # read before the search: the next call then sees a version that another thread adds
            for version in self.latest():
                for name in (version.schema.table, version.schema.relation):
                    numbers.setdefault(name, set()).add(version.table)
            self._numbers_by_name = (count, numbers)
        of_relation = set() if relation is None else numbers.get(relation, set())
        return sorted(numbers.get(table, set()) | of_relation)

    def latest_of(self, table: int) -> LogSchemaVersion:
        """Return the newest known version of one table."""
        if table not in self._latest:
            self.load()
        if table not in self._latest:
            raise ConfigError(
                "the log has no table of this number",
                table=table,
                hint="`tailrace log FILE show` lists the tables it has.",
            )
        return self._latest[table]

    def schemas_of(self, schema: TableSchema) -> list[TableSchema]:
        """Return all known schemas of the table that has this one, oldest first."""
        return [item.schema for item in self.versions_of(self._tables[schema.relation])]

    def versions_of(self, table: int) -> list[LogSchemaVersion]:
        """Return all known versions of a table, oldest first."""
        matching = (item for item in self._all() if item.table == table)
        return sorted(matching, key=lambda item: item.version)

    def numbers_named(self, table: TableId | str) -> list[int]:
        """Return the numbers that a table of this name has had.

        A text is `schema.table`, or the name of a system stream.
        """
        numbers = {
            version.table for version in self._all() if table in (version.schema.table, str(version.schema.table))
        }
        return sorted(numbers)

    def numbers_matching(self, wanted: Callable[[TableId], bool]) -> frozenset[int]:
        """Return the numbers of source tables of which any name, past or present, matches."""
        return frozenset(
            version.table for version in self._all() if not is_system(version.schema) and wanted(version.schema.table)
        )

    def versions_after(self, ordinal: int) -> list[LogSchemaVersion]:
        """Return the versions with a greater ordinal, in order."""
        later = [version for version in self._all() if version.ordinal > ordinal]
        return sorted(later, key=lambda version: version.ordinal)

    def _all(self) -> list[LogSchemaVersion]:
        """Return a copy of every known version: another thread may add one meanwhile."""
        return list(self._versions.values())

    def record(self, schema: TableSchema) -> LogSchemaVersion:
        """Return the version with this schema, durable when this returns."""
        # A stream passes the same object again and again; comparing schemas column by column is what costs.
        recorded = self._recorded.get(id(schema))
        if recorded is not None and self._latest[recorded[1].table] is recorded[1]:
            return recorded[1]
        version = self._record(schema)
        if len(self._recorded) >= _RECORDED_MAX:
            self._recorded.clear()
        self._recorded[id(schema)] = (schema, version)
        return version

    def _record(self, schema: TableSchema) -> LogSchemaVersion:
        table = self._tables.get(schema.relation)
        latest = self._latest.get(table) if table is not None else None
        before = replace(latest.schema, facts=self._facts.get(latest.table, latest.schema.facts)) if latest else None
        if latest is not None and before is not None and same_version(before, schema):
            if schema.facts is not None:
                self._facts[latest.table] = schema.facts  # a TRUNCATE of today is not blamed on an ALTER of tomorrow
            return latest
        if table is None:
            table = SCHEMA_STREAM_NUMBER if schema == SCHEMA_STREAM else max(self._latest, default=0) + 1
        version = LogSchemaVersion(
            table=table,
            version=latest.version + 1 if latest else 1,
            schema=schema,
            arrow_schema=schema.change_schema(),
            ordinal=0 if is_system(schema) else self._ordinal + 1,
            definition=schema.to_json() | (compare_schemas(before, schema).to_json() if before else {"changes": []}),
        )
        stored = {"format": FORMAT, "table": table, "version": version.version, "ordinal": version.ordinal}
        stored |= version.definition
        path = self._path(table, version.version)
        with files.explain_errors(path):
            files.make_folder(path.parent)
            files.create(path, records.encode(stored))
        failpoints.hit("log.schema_recorded")
        self._remember(version)
        return version

    def _remember(self, version: LogSchemaVersion) -> None:
        self._versions[version.table, version.version] = version
        self._ordinal = max(self._ordinal, version.ordinal)
        self._tables[version.schema.relation] = version.table
        known = self._latest.get(version.table)
        if known is None or known.version < version.version:
            self._latest[version.table] = version
            self._facts.pop(version.table, None)
        self._version_count += 1

    def _path(self, table: int, version: int) -> LogPath:
        return self._folder / str(table) / f"{version}.json"

    def _read(self, path: LogPath) -> LogSchemaVersion:
        try:
            stored = records.decode(path.read_bytes(), FORMAT)
            if path != self._path(stored["table"], stored["version"]):
                raise ValueError("it belongs to another file name")
            schema = TableSchema.from_json(stored)
            return LogSchemaVersion(
                table=stored["table"],
                version=stored["version"],
                schema=schema,
                arrow_schema=schema.change_schema(),
                ordinal=stored.get("ordinal", 0),
                definition={name: stored[name] for name in stored if name not in _IDENTITY_FIELDS},
            )
        except files.STORE_ERRORS as error:
            raise files.explained_error(error, path) from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError, pa.ArrowException) as error:
            raise LogCorrupt(
                f"a table's schema cannot be read: {error}",
                path=path,
                hint="Restore the file from a copy of the log, or start a new log.",
            ) from error


class TableSelector:
    """A table, selected by name, by its two parts, or by the log's number.

    A name is `schema.table`, or that of a system stream. A table made again under the same name has another number,
    which is selected too. A renamed table is found by each name it had, and keeps its number. A table without rows in
    the log is refused, unless it `may_come`.
    """

    def __init__(self, schemas: LogSchemas, table: TableId | str | int, *, may_come: bool = False) -> None:
        self._schemas = schemas
        schemas.load()
        if isinstance(table, int):
            numbers, name = [table], str(schemas.latest_of(table).schema.table)
        else:
            numbers, name = schemas.numbers_named(table), str(table)
        # System streams are always there, if only with nothing in them yet.
        if not numbers and not may_come and name not in SYSTEM_STREAMS:
            raise ConfigError(
                "the log has no rows of this table",
                table=table,
                hint="`tailrace log FILE show` lists the tables it has; a name is `schema.table`, case included.",
            )
        self.name = name
        self.numbers = set(numbers)

    def matches(self, number: int, version: int) -> bool:
        """Return true if rows of this table and version are selected."""
        if number not in self.numbers and str(self._schemas.get(number, version).schema.table) == self.name:
            self.numbers.add(number)
        return number in self.numbers


EXPECTED_FOLDER = "expected"
EXPECTED_FORMAT = 1


def record_known_table(log: LogPath, schema: TableSchema) -> None:
    """Record the schema of a table whose rows may arrive later."""
    path = log / EXPECTED_FOLDER / f"{table_token(schema.table)}.json"
    text = records.encode({"format": EXPECTED_FORMAT, **schema.to_json()})
    files.make_folder(path.parent)
    with files.explain_errors(path):
        with suppress(FileNotFoundError):
            if path.read_bytes() == text:
                return
        files.replace_durably(path, text)


def known_tables(log: LogPath) -> list[TableSchema]:
    """Return all recorded schemas by table name, also of tables that have rows by now.

    A damaged file counts as absent.
    """
    with files.explain_errors(log / EXPECTED_FOLDER):
        schemas = [_read_known(path) for path in files.matching_files(log / EXPECTED_FOLDER, "*.json")]
    return sorted((schema for schema in schemas if schema is not None), key=lambda schema: schema.table)


def known_table(log: LogPath, table: TableId) -> TableSchema | None:
    """Return the schema that a table's first row is expected to have.

    None if it is not recorded.
    """
    path = log / EXPECTED_FOLDER / f"{table_token(table)}.json"
    with files.explain_errors(path):
        return _read_known(path)


def _read_known(path: LogPath) -> TableSchema | None:
    try:
        return TableSchema.from_json(records.decode(path.read_bytes(), EXPECTED_FORMAT))
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None
