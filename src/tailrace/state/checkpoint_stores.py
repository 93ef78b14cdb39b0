"""Checkpoints in memory, and in files: one JSON file for each key, in a folder with one owner.

`state.folder` says what makes a file durable and who may write, `state.records` how damage is found. Here a file is
tied to its key: one that was copied or moved to another name is not read as that key's.
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
    "Restore the file from a copy. Without one, `delete` this checkpoint and seed it with a position that the sink "
    "certainly has; see docs/guides/checkpoints.md."
)


class MemoryCheckpointStore:
    """Checkpoints for as long as the process lives."""

    def __init__(self) -> None:
        self._saved: dict[str, Checkpoint] = {}
        self._one_at_a_time = threading.Lock()

    def __enter__(self) -> MemoryCheckpointStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is held; so that one store can stand in for the other."""

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
    """With metadata of its own."""
    return Checkpoint.from_json(checkpoint.to_json())


class FileCheckpointStore:
    """Checkpoints in a folder. Opened to write it has one owner at a time; any number may read beside it."""

    def __init__(self, path: str | os.PathLike[str], *, read_only: bool = False, take_over: bool = False) -> None:
        """`take_over` takes it from an owner on another host, which must be gone: nobody here can see whether it is."""
        self._folder = StateFolder(path, "the checkpoint store", read_only=read_only, take_over=take_over)
        self._durable: dict[str, tuple[bytes, Checkpoint | None]] = {}
        """What we have made durable ourselves: the file, and what we wrote in it, if it was us."""
        self._one_at_a_time = threading.Lock()

    def __enter__(self) -> FileCheckpointStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let the next owner in."""
        self._folder.close()

    def save(self, key: str, checkpoint: Checkpoint) -> None:
        check_key(key)
        require_checkpoint(checkpoint)
        with self._one_at_a_time:
            self._folder.require_owner()
            found = self._folder.read(key + _SUFFIX)
            content, written = self._durable.get(key, (None, None))
            checkpoint.require_follows(written if written and content == found else self._decoded(key, found))
            content = records.encode_state({"format": FORMAT, "key": key} | checkpoint.to_json())
            self._folder.replace(key + _SUFFIX, content)
            self._durable[key] = (content, checkpoint)

    def load(self, key: str) -> Checkpoint | None:
        check_key(key)
        with self._one_at_a_time:
            content = self._folder.read(key + _SUFFIX)
            found = self._decoded(key, content)
            if content is None or self._folder.read_only or self._durable.get(key, (None,))[0] == content:
                return found
            # Whoever loads it tells the source that all up to here may go.
            self._folder.make_durable(key + _SUFFIX)
            self._durable[key] = (content, None)
            return found

    def delete(self, key: str) -> bool:
        check_key(key)
        with self._one_at_a_time:
            self._durable.pop(key, None)
            return self._folder.remove(key + _SUFFIX)

    def list(self) -> tuple[str, ...]:
        return tuple(self._key_of(name) for name in self._folder.names() if name.endswith(_SUFFIX))

    def all(self) -> dict[str, Checkpoint]:
        found = {key: self.load(key) for key in self.list()}
        return {key: checkpoint for key, checkpoint in found.items() if checkpoint is not None}

    def _key_of(self, name: str) -> str:
        try:
            return check_key(name.removesuffix(_SUFFIX))
        except ConfigError as error:
            raise self._folder.corrupt_error(name, error.message, "It is none of ours: move it away.") from error

    def _decoded(self, key: str, content: bytes | None) -> Checkpoint | None:
        name = key + _SUFFIX
        if content is None:
            return None
        try:
            stored = records.decode_state(content, FORMAT)
            if stored["key"] != key:
                raise ValueError("it is the checkpoint of another key, or of one that differs in case only")
            return parse_checkpoint(stored)
        except (ConfigError, ValueError, KeyError, TypeError, AttributeError) as error:
            hint = records.unreadable_hint(error, _HINT)
            raise self._folder.corrupt_error(name, unreadable_reason(error), hint) from error
