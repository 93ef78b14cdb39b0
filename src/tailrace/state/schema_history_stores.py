"""A schema history in files: one JSON file for each version, in a folder with one owner.

A version's file never changes; the oldest are removed one after another. So what is kept of a table has no gap, and a
gap is damage. Names of tables can be anything, so a file is called by their hash; the names stand in it.
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
    "Restore the file from a copy. Without one, move the whole folder away: the history begins anew with the shapes "
    "that tables have now."
)
_LOOKS_MAX = 20
"""At a folder whose oldest files go while they are read."""


class FileSchemaHistory(MemorySchemaHistory):
    """Versions in a folder. Opened to write it has one owner at a time; any number may read beside it."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        retention: Retention | None = DEFAULT_RETENTION,
        read_only: bool = False,
        take_over: bool = False,
    ) -> None:
        """`take_over` takes it from an owner on another host, which must be gone: nobody here can see whether it is."""
        super().__init__(retention=retention)
        self._names: list[str] | None = None
        """The files that were read; None: look again."""
        self._read: dict[str, SchemaVersion] = {}
        self._doubtful: str | None = None
        """A file of which it is not known whether it was written."""
        self._folder = StateFolder(path, "the schema history", read_only=read_only, take_over=take_over)
        try:
            self._look()
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
        # If this fails, the file may be there all the same: it is looked for, and made durable, before anything else.
        known, self._names, self._doubtful = self._names, None, name
        self._folder.create(name, records.encode_state({"format": FORMAT} | version.to_json()))
        self._read[name] = version
        self._names, self._doubtful = [*(known or ()), name], None

    def _let_go(self, versions: Sequence[SchemaVersion]) -> None:
        for version in versions:  # one is gone for good before the next one goes
            name = _name(version.table, version.version)
            self._folder.remove(name)
            self._read.pop(name, None)

    def _look(self) -> None:
        if self._names is not None and not self._folder.read_only:
            return
        for _ in range(_LOOKS_MAX):
            names = [name for name in self._folder.names() if _NAME.fullmatch(name)]
            if names == self._names:
                return
            found = {name: self._read.get(name) or self._version(name) for name in names}
            if all(found.values()):
                break
        self._read = {name: version for name, version in found.items() if version is not None}
        self._kept, self._tables = {}, {}
        for version in sorted(self._read.values(), key=lambda version: (version.table, version.version)):
            self._take(version)
        self._require_dense()
        self._hand_out_numbers()
        if not self._folder.read_only:
            self._make_durable()
        self._names = names

    def _make_durable(self) -> None:
        """Names that a predecessor gave, and the one that we could not."""
        if self._doubtful in self._read:
            self._folder.make_durable(self._doubtful)
        self._doubtful = None
        with explain_errors(self._folder.path, self._folder.what):
            local.sync_folder(self._folder.path)

    def _require_dense(self) -> None:
        for table, kept in self._kept.items():
            first = kept[0].version
            for place, version in enumerate(kept):
                if version.version != first + place:
                    raise self._folder.corrupt_error(_name(table, first + place), "it is missing", _HINT)

    def _hand_out_numbers(self) -> None:
        """A table that was renamed gave its number to another: whoever has it now is not the one read last."""
        latest = [kept[-1] for kept in self._kept.values()]
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
                raise ValueError("it belongs to another place")
            return version
        except ConfigError as error:
            raise self._folder.corrupt_error(name, error.message, _HINT) from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError, pa.ArrowException) as error:
            raise self._folder.corrupt_error(name, error, records.unreadable_hint(error, _HINT)) from error


def _name(table: TableId, version: int) -> str:
    called = hashlib.sha256(f"{table.schema}\0{table.name}".encode("utf-8", "surrogatepass")).hexdigest()
    return f"{called[:32]}.{version}.json"
