"""Which tables the log knows, and every version of their shape, each written before its first row.

A table's number is given once and never again; a version's file never changes. So a row's (table, version)
says for ever how to read it. Versions of all tables together are counted (`ordinal`), so that the log can say
which of them it has announced in its `schema` stream.
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
_PLACE = ("format", "table", "version", "ordinal")
"""What a file says of where the version stands; the rest is its definition."""


@dataclass(frozen=True, kw_only=True)
class LogSchemaVersion:
    """One version of one table's shape, as the log numbers it."""

    table: int
    version: int
    schema: TableSchema
    arrow_schema: pa.Schema
    """Of a stored change, with every optional column."""
    ordinal: int = 0
    """Counts the versions of all tables, in the order they came; 0 for a system stream."""
    definition: dict[str, Any] = field(compare=False, repr=False)
    """As it is stored: the shape, and what became of the table since the version before."""
    _stored: dict[tuple[str, ...], pa.Schema] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def required_column_count(self) -> int:
        """How many columns a stored change has at least."""
        return len(self.arrow_schema) - len(change.OPTIONAL)

    def stored_schema(self, without: tuple[str, ...]) -> pa.Schema:
        """Of a body that leaves these columns out."""
        if without not in self._stored:
            self._stored[without] = pa.schema([kept for kept in self.arrow_schema if kept.name not in without])
        return self._stored[without]


class LogSchemas:
    """The log's `schemas` folder. One writer; any number of readers, who find new files as they need them."""

    def __init__(self, folder: LogPath) -> None:
        self._folder = folder
        self._versions: dict[tuple[int, int], LogSchemaVersion] = {}
        self._tables: dict[int, int] = {}  # relation -> table
        self._latest: dict[int, LogSchemaVersion] = {}
        self._recorded: dict[int, tuple[TableSchema, LogSchemaVersion]] = {}  # by the shape's id()
        self._facts: dict[int, CatalogueFacts] = {}  # table -> what was told last of its latest version
        self._ordinal = 0
        self._kept = 0
        self._found: tuple[int, dict[TableId | int, set[int]]] = (0, {})  # as of so many kept

    def load(self) -> None:
        """Read everything there is and was not read before: a version's file never changes."""
        known = {self._path(*key) for key in list(self._versions)}
        with files.explain_errors(self._folder):
            found = files.matching_files(self._folder, "*/*.json")
        for path in found:
            if path not in known and not path.name.startswith("."):
                self._keep(self._read(path))

    def make_durable(self, announced: int) -> None:
        """Make durable what was recorded and not announced yet: its writer may have died, or failed, before it was.

        Of those that were announced none may be missing: its number would be given again, to another shape.
        """
        missing = set(range(1, announced + 1)) - {version.ordinal for version in self._all()}
        if missing:
            raise LogCorrupt(
                "a table's shape is missing",
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
        """The named version; it stands in its file since before its first row."""
        known = self._versions.get((table, version))
        if known is None:
            known = self._read(self._path(table, version))
            self._keep(known)
        return known

    def latest(self) -> list[LogSchemaVersion]:
        """The newest known version of every table of the source."""
        found = [self._latest[table] for table in sorted(self._latest)]
        return [version for version in found if not is_system(version.schema)]

    def current_numbers(self, table: TableId, relation: int | None) -> list[int]:
        """The numbers of the tables of the source that are known last by this name, or have this relation.

        Asked for every table of a pipeline in every micro-batch, so it must not look through all of them each time.
        """
        kept, found = self._found
        if kept != self._kept:
            kept, found = self._kept, {}  # counted before it is looked at: one that comes meanwhile is found next time
            for version in self.latest():
                for name in (version.schema.table, version.schema.relation):
                    found.setdefault(name, set()).add(version.table)
            self._found = (kept, found)
        related = set() if relation is None else found.get(relation, set())
        return sorted(found.get(table, set()) | related)

    def latest_of(self, table: int) -> LogSchemaVersion:
        """The newest known version of one table."""
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
        """All known shapes of the table that has this one, oldest first."""
        return [item.schema for item in self.versions_of(self._tables[schema.relation])]

    def versions_of(self, table: int) -> list[LogSchemaVersion]:
        """All known versions of a table, oldest first."""
        found = (item for item in self._all() if item.table == table)
        return sorted(found, key=lambda item: item.version)

    def numbers_named(self, table: TableId | str) -> list[int]:
        """The numbers a table of this name has had; a text is `schema.table`, or the name of a system stream."""
        found = {version.table for version in self._all() if table in (version.schema.table, str(version.schema.table))}
        return sorted(found)

    def numbers_matching(self, wanted: Callable[[TableId], bool]) -> frozenset[int]:
        """The numbers of the source's tables that have, or had, a name that is wanted."""
        return frozenset(
            version.table for version in self._all() if not is_system(version.schema) and wanted(version.schema.table)
        )

    def versions_after(self, ordinal: int) -> list[LogSchemaVersion]:
        """The versions counted after this one."""
        later = [version for version in self._all() if version.ordinal > ordinal]
        return sorted(later, key=lambda version: version.ordinal)

    def _all(self) -> list[LogSchemaVersion]:
        """Every known version. A copy: another thread may find one more while they are gone through."""
        return list(self._versions.values())

    def record(self, schema: TableSchema) -> LogSchemaVersion:
        """The version that is this shape, durable when this returns."""
        # A stream gives the same object again and again; comparing shapes column by column is what costs.
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
        self._keep(version)
        return version

    def _keep(self, version: LogSchemaVersion) -> None:
        self._versions[version.table, version.version] = version
        self._ordinal = max(self._ordinal, version.ordinal)
        self._tables[version.schema.relation] = version.table
        known = self._latest.get(version.table)
        if known is None or known.version < version.version:
            self._latest[version.table] = version
            self._facts.pop(version.table, None)
        self._kept += 1

    def _path(self, table: int, version: int) -> LogPath:
        return self._folder / str(table) / f"{version}.json"

    def _read(self, path: LogPath) -> LogSchemaVersion:
        try:
            stored = records.decode(path.read_bytes(), FORMAT)
            if path != self._path(stored["table"], stored["version"]):
                raise ValueError("it belongs to another place")
            schema = TableSchema.from_json(stored)
            return LogSchemaVersion(
                table=stored["table"],
                version=stored["version"],
                schema=schema,
                arrow_schema=schema.change_schema(),
                ordinal=stored.get("ordinal", 0),
                definition={name: stored[name] for name in stored if name not in _PLACE},
            )
        except files.STORE_ERRORS as error:
            raise files.explained_error(error, path) from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError, pa.ArrowException) as error:
            raise LogCorrupt(
                f"a table's shape cannot be read: {error}",
                path=path,
                hint="Restore the file from a copy of the log, or start a new log.",
            ) from error


class TableSelector:
    """A table by name (`schema.table`, or that of a system stream), by its two parts, or by the log's number.

    Made again under the same name it has another number, which is taken too. One that was renamed is found by each
    name it had, and keeps its number. One that the log has no rows of is refused, unless they `may_come`.
    """

    def __init__(self, schemas: LogSchemas, table: TableId | str | int, *, may_come: bool = False) -> None:
        self._schemas = schemas
        schemas.load()
        if isinstance(table, int):
            found, name = [table], str(schemas.latest_of(table).schema.table)
        else:
            found, name = schemas.numbers_named(table), str(table)
        # System streams are always there, if only with nothing in them yet.
        if not found and not may_come and name not in SYSTEM_STREAMS:
            raise ConfigError(
                "the log has no rows of such a table",
                table=table,
                hint="`tailrace log FILE show` lists the tables it has; a name is `schema.table`, case included.",
            )
        self.name = name
        self.numbers = set(found)

    def matches(self, number: int, version: int) -> bool:
        """Whether rows of this table and version are asked for."""
        if number not in self.numbers and str(self._schemas.get(number, version).schema.table) == self.name:
            self.numbers.add(number)
        return number in self.numbers


EXPECTED_FOLDER = "expected"
EXPECTED_FORMAT = 1


def record_known_table(log: LogPath, schema: TableSchema) -> None:
    """Rows of this shape may come."""
    path = log / EXPECTED_FOLDER / f"{table_token(schema.table)}.json"
    text = records.encode({"format": EXPECTED_FORMAT, **schema.to_json()})
    files.make_folder(path.parent)
    with files.explain_errors(path):
        with suppress(FileNotFoundError):
            if path.read_bytes() == text:
                return
        files.replace_durably(path, text)


def known_tables(log: LogPath) -> list[TableSchema]:
    """All that was noted, by name; also of tables that have rows by now. What is not what was written counts for
    nothing."""
    with files.explain_errors(log / EXPECTED_FOLDER):
        found = [_read_known(path) for path in files.matching_files(log / EXPECTED_FOLDER, "*.json")]
    return sorted((shape for shape in found if shape is not None), key=lambda shape: shape.table)


def known_table(log: LogPath, table: TableId) -> TableSchema | None:
    """The shape that the first row of a table is expected to have, as far as anybody knows."""
    path = log / EXPECTED_FOLDER / f"{table_token(table)}.json"
    with files.explain_errors(path):
        return _read_known(path)


def _read_known(path: LogPath) -> TableSchema | None:
    try:
        return TableSchema.from_json(records.decode(path.read_bytes(), EXPECTED_FORMAT))
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None
