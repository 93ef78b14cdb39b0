"""A schema history in files: one JSON file per version.

The files lie in a folder with one owner. A version's file never changes. The oldest files are removed one after
another, so the versions of a table have no gap: a gap is damage. A table's name may be any text, so a file is named by
its hash and has the name inside.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence

import pyarrow as pa

from tailrace.errors import ConfigError
from tailrace.model.schema import TableId
from tailrace.state.schema_history import DEFAULT_RETENTION, MemorySchemaHistory, Retention, SchemaEvent, SchemaVersion
from tailrace.storage import local, records
from tailrace.storage.owned_folder import StateFolder, explain_errors

FORMAT = 1
_NAME = re.compile(r"[0-9a-f]{32}\.[1-9][0-9]{0,9}\.json")
_HINT = (
    "Restore the file from a copy. Without one, move the whole folder away: a new history begins with the schemas "
    "that tables have now."
)
_LOOKS_MAX = 20
"""Attempts to list a folder whose oldest files are removed while they are read."""


class FileSchemaHistory(MemorySchemaHistory):
    """Versions in a folder. Only one process may open it to write; any number may read meanwhile."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        retention: Retention | None = DEFAULT_RETENTION,
        read_only: bool = False,
        take_over: bool = False,
    ) -> None:
        """Open the folder. `take_over` takes it from an owner on another host.

        That owner must be stopped: this host cannot see whether it is.
        """
        super().__init__(retention=retention)
        self._names: list[str] | None = None
        """Names of the files that were read; None: list the folder again."""
        self._read: dict[str, SchemaVersion] = {}
        self._doubtful: str | None = None
        """A file that may or may not have been written."""
        self._folder = StateFolder(path, "the schema history", read_only=read_only, take_over=take_over)
        try:
            self._refresh()
            if not read_only:
                for table in self.tables():
                    if retention is not None:
                        self._trim(table, retention)
        except BaseException:
            self._folder.close()
            raise

    def close(self) -> None:
        self._folder.close()

    def _add(self, version: SchemaVersion) -> None:
        name = _name(version.table, version.version)
        # If this fails, the file may still exist: the next call looks for it and makes it durable first.
        known, self._names, self._doubtful = self._names, None, name
        self._folder.create(name, records.encode_state({"format": FORMAT} | version.to_json()))
        self._read[name] = version
        self._names, self._doubtful = [*(known or ()), name], None

    def _remove(self, versions: Sequence[SchemaVersion]) -> None:
        for version in versions:  # each removal is durable before the next: no gap
            name = _name(version.table, version.version)
            self._folder.remove(name)
            self._read.pop(name, None)

    def _refresh(self) -> None:
        if self._names is not None and not self._folder.read_only:
            return
        for _ in range(_LOOKS_MAX):
            names = [name for name in self._folder.names() if _NAME.fullmatch(name)]
            if names == self._names:
                return
            versions = {name: self._read.get(name) or self._version(name) for name in names}
            if all(versions.values()):
                break
        self._read = {name: version for name, version in versions.items() if version is not None}
        self._versions, self._tables = {}, {}
        for version in sorted(self._read.values(), key=lambda version: (version.table, version.version)):
            self._index_version(version)
        self._require_dense()
        self._assign_numbers()
        if not self._folder.read_only:
            self._make_durable()
        self._names = names

    def _make_durable(self) -> None:
        """Sync the folder's names: those of a former owner, and the doubtful one."""
        if self._doubtful in self._read:
            self._folder.make_durable(self._doubtful)
        self._doubtful = None
        with explain_errors(self._folder.path, self._folder.what):
            local.sync_folder(self._folder.path)

    def _require_dense(self) -> None:
        for table, versions in self._versions.items():
            first = versions[0].version
            for index, version in enumerate(versions):
                if version.version != first + index:
                    raise self._folder.corrupt_error(_name(table, first + index), "it is missing", _HINT)

    def _assign_numbers(self) -> None:
        """Map each source number to the table that has it now.

        A renamed table passed its number on, so the table read last need not be the one that has it.
        """
        latest = [kept[-1] for kept in self._versions.values()]
        self._tables = {}
        for version in sorted(latest, key=lambda version: version.event is SchemaEvent.DROP):
            self._tables.setdefault(version.schema.relation, version.table)

    def _version(self, name: str) -> SchemaVersion | None:
        content = self._folder.read(name)
        if content is None:
            return None
        try:
            version = SchemaVersion.from_json(records.decode_state(content, FORMAT))
            if name != _name(version.table, version.version):
                raise ValueError("it belongs to another table or version")
            return version
        except ConfigError as error:
            raise self._folder.corrupt_error(name, error.message, _HINT) from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError, pa.ArrowException) as error:
            raise self._folder.corrupt_error(name, error, records.unreadable_hint(error, _HINT)) from error


def _name(table: TableId, version: int) -> str:
    digest = hashlib.sha256(f"{table.schema}\0{table.name}".encode("utf-8", "surrogatepass")).hexdigest()
    return f"{digest[:32]}.{version}.json"
