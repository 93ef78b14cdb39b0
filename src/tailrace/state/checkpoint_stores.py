"""Checkpoint stores in memory and in files.

A store in files has one JSON file per key, in a folder with one owner. `storage.owned_folder` says what makes a file
durable and who may write; `storage.records` says how damage is found. A file belongs to its key: a file copied or moved
to another name is not read as that name's checkpoint.
"""

from __future__ import annotations

import os
import threading

from tailrace.errors import ConfigError
from tailrace.state.checkpoint import Checkpoint, check_key, parse_checkpoint, require_checkpoint, unreadable_reason
from tailrace.storage import records
from tailrace.storage.owned_folder import StateFolder

FORMAT = 1
_SUFFIX = ".json"
_HINT = (
    "Restore the file from a copy. Without one, `delete` this checkpoint and call `seed_checkpoint` with a position "
    "that the sink certainly has; see docs/guides/checkpoints.md."
)


class MemoryCheckpointStore:
    """A checkpoint store that lasts as long as the process."""

    def __init__(self) -> None:
        self._saved: dict[str, Checkpoint] = {}
        self._one_at_a_time = threading.Lock()

    def __enter__(self) -> MemoryCheckpointStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Do nothing. The method exists so that one store can replace the other."""

    def save(self, key: str, checkpoint: Checkpoint) -> None:
        check_key(key)
        require_checkpoint(checkpoint)
        with self._one_at_a_time:
            checkpoint.require_follows(self._saved.get(key))
            self._saved[key] = _copy(checkpoint)

    def load(self, key: str) -> Checkpoint | None:
        saved = self._saved.get(check_key(key))
        return _copy(saved) if saved is not None else None

    def delete(self, key: str) -> bool:
        check_key(key)
        with self._one_at_a_time:
            return self._saved.pop(key, None) is not None

    def list(self) -> tuple[str, ...]:
        return tuple(sorted(self._saved))

    def all(self) -> dict[str, Checkpoint]:
        return {key: _copy(saved) for key, saved in sorted(self._saved.items())}


def _copy(checkpoint: Checkpoint) -> Checkpoint:
    """Return a copy with its own metadata."""
    return Checkpoint.from_json(checkpoint.to_json())


class FileCheckpointStore:
    """Checkpoints in a folder. Only one process may open it to write; any number may read meanwhile."""

    def __init__(self, path: str | os.PathLike[str], *, read_only: bool = False, take_over: bool = False) -> None:
        """Open the folder. `take_over` takes it from an owner on another host.

        That owner must be stopped: this host cannot see whether it is.
        """
        self._folder = StateFolder(path, "the checkpoint store", read_only=read_only, take_over=take_over)
        self._durable: dict[str, tuple[bytes, Checkpoint | None]] = {}
        """Files that this process has made durable, by key: the content, and the checkpoint if we wrote it."""
        self._one_at_a_time = threading.Lock()

    def __enter__(self) -> FileCheckpointStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the folder to the next owner."""
        self._folder.close()

    def save(self, key: str, checkpoint: Checkpoint) -> None:
        check_key(key)
        require_checkpoint(checkpoint)
        with self._one_at_a_time:
            self._folder.require_owner()
            current = self._folder.read(key + _SUFFIX)
            content, written = self._durable.get(key, (None, None))
            checkpoint.require_follows(written if written and content == current else self._decoded(key, current))
            content = records.encode_state({"format": FORMAT, "key": key} | checkpoint.to_json())
            self._folder.replace(key + _SUFFIX, content)
            self._durable[key] = (content, checkpoint)

    def load(self, key: str) -> Checkpoint | None:
        check_key(key)
        with self._one_at_a_time:
            content = self._folder.read(key + _SUFFIX)
            checkpoint = self._decoded(key, content)
            if content is None or self._folder.read_only or self._durable.get(key, (None,))[0] == content:
                return checkpoint
            # The caller lets the source discard its log up to the loaded position, so the file must be durable first.
            self._folder.make_durable(key + _SUFFIX)
            self._durable[key] = (content, None)
            return checkpoint

    def delete(self, key: str) -> bool:
        check_key(key)
        with self._one_at_a_time:
            self._durable.pop(key, None)
            return self._folder.remove(key + _SUFFIX)

    def list(self) -> tuple[str, ...]:
        return tuple(self._key_of(name) for name in self._folder.names() if name.endswith(_SUFFIX))

    def all(self) -> dict[str, Checkpoint]:
        loaded = {key: self.load(key) for key in self.list()}
        return {key: checkpoint for key, checkpoint in loaded.items() if checkpoint is not None}

    def _key_of(self, name: str) -> str:
        try:
            return check_key(name.removesuffix(_SUFFIX))
        except ConfigError as error:
            raise self._folder.corrupt_error(
                name, error.message, "Move the file away: it is not one of ours."
            ) from error

    def _decoded(self, key: str, content: bytes | None) -> Checkpoint | None:
        name = key + _SUFFIX
        if content is None:
            return None
        try:
            stored = records.decode_state(content, FORMAT)
            if stored["key"] != key:
                raise ValueError("it belongs to another key, or to one that differs in case only")
            return parse_checkpoint(stored)
        except (ConfigError, ValueError, KeyError, TypeError, AttributeError) as error:
            hint = records.unreadable_hint(error, _HINT)
            raise self._folder.corrupt_error(name, unreadable_reason(error), hint) from error
