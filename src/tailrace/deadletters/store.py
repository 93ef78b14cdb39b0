"""Store dead letters, the changes that a lake table could not take, below `<log>/dead/<table>/`.

    table.json              the table's name
    <seq>-<n>.arrow         a step: dead letters, each with its payload and cause, and which earlier ones it clears;
                            or rows that a load could not write, which count once the table is from that load;
                            or a replay intent
    load.json               a load of the whole table that is about to be committed: the steps it clears
    forgotten-<id>.json     dead letters that a person has dropped
    replay.json             a person asks for a replay
    past.json               which versions of the table may lack rows that were dead letters

A step is written before the table's own commit and is named by the `_seq` that the commit reaches. It counts once the
table is there. So a dead letter is never lost, and a step of a commit that a crash prevented is void. A change is one
dead letter, identified by its `_seq`. A row that a load has read is identified by a number below zero, assigned when
the load is committed. A step may mark dead letters as *superseded*: they stay open, but nothing builds on them any
more.

A replay is in two phases. A *replay intent* is a step with a replay id: it will clear dead letters whose changes are
about to be written to the table. The table commit that writes them has the id. The intent counts once the table is
found to have its id (`confirm_replay`). An intent without such a commit stays until another replay is confirmed,
because the process that wrote it may still be at work. Payloads are copies, so retention of the log does not affect
them.

A reader passes the table's `_seq` and the load that it is from. Steps that this load has cleared are ignored, even
before the next apply has removed them.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from tailrace.deadletters.step_file import (
    SEQ_INDEX,
    DeadLetterBatch,
    DeadLetterOrigin,
    StepHeader,
    encode_step,
    key_columns,
    read_rows,
    read_step,
    unreadable_error,
    with_causes,
)
from tailrace.errors import TailraceError
from tailrace.model import change
from tailrace.model.schema import TableId, TableSchema, table_token
from tailrace.storage import files
from tailrace.storage.files import LogPath

FOLDER = "dead"
_SEEN_SECONDS = 2.0
_tables_seen: dict[LogPath, tuple[float, frozenset[str]]] = {}
LOOKS_MAX = 100
"""Attempts to read steps while another process removes some."""


class DeadLetterStore:
    """The dead letters of one table.

    Plain data: a task may have one too. Only the process that applies to the table writes steps.
    """

    def __init__(self, log: LogPath, table: TableId) -> None:
        self.table = table
        self._path = log / FOLDER / table_token(table)

    @property
    def has_any(self) -> bool:
        """True if there are any steps. Cheap to check."""
        return bool(self._steps())

    def count(self, seq: int, load: str | None = None) -> int:
        """Return the number of open ones, for a table at this `_seq`."""
        return len(self._open(self._counting(seq, load)))

    def read_open(
        self, seq: int, load: str | None = None, *, only: Collection[int] | None = None
    ) -> list[DeadLetterBatch]:
        """Return all or some open ones, each with its payload and newest cause."""
        return self._read_batches(seq, load, only)

    def read_open_keys(self, seq: int, load: str | None = None) -> list[DeadLetterBatch]:
        """Return those that are not superseded, with no table column but the key.

        Payloads may be large.
        """
        superseded, selected = self.superseded(seq, load), None
        if superseded:
            selected = {number for number in self._open(self._counting(seq, load)) if number not in superseded}
        batches = self._read_batches(seq, load, selected)
        return [replace(batch, rows=batch.rows.select(key_columns(batch.schema, batch.rows))) for batch in batches]

    def superseded(self, seq: int, load: str | None = None) -> frozenset[int]:
        """Return the dead letters, open or not, that nothing builds on any more."""
        return frozenset(number for _, step in self._counting(seq, load) for number in step.superseded)

    def _read_batches(self, seq: int, load: str | None, only: Collection[int] | None) -> list[DeadLetterBatch]:
        for _ in range(LOOKS_MAX):
            with suppress(FileNotFoundError):  # the apply has removed a step since, so look again
                return list(self._read(seq, load, only))
        raise unreadable_error(self._path)

    def _read(self, seq: int, load: str | None, only: Collection[int] | None) -> Iterator[DeadLetterBatch]:
        steps = self._counting(seq, load)
        owner = self._open(steps)
        for path, step in steps:
            numbers = [
                number for number in step.dead_letters if owner.get(number) == path and (only is None or number in only)
            ]
            if numbers:
                rows = read_rows(path)
                indices = np.flatnonzero(np.isin(rows.column(SEQ_INDEX).to_numpy(), np.array(numbers, np.int64)))
                is_all = len(indices) == rows.num_rows
                rows = rows if is_all else rows.take(pa.array(indices))
                yield DeadLetterBatch(schema=TableSchema.from_json(step.schema), rows=rows, origin=step.origin)

    def write(
        self,
        schema: TableSchema,
        seq: int,
        dead_letters: pa.Table,
        causes: Sequence[TailraceError],
        cleared: Collection[int],
        *,
        superseded: Collection[int] = (),
        already_applied: bool = False,
        version: int | None = None,
        origin: DeadLetterOrigin | None = None,
        replay_id: str | None = None,
    ) -> None:
        """Write a step that counts once the table has reached `seq`; durable when this returns.

        With `already_applied` the table has reached it, and rows were written at its position. Then earlier versions
        have the same `_seq`; `version` is the first one with the rows, if known. With a `replay_id` the step is a
        replay intent, and counts once that is confirmed.
        """
        files.make_folder(self._path)
        with files.explain_errors(self._path):
            if not (self._path / "table.json").exists():
                self._record("table.json", {"schema": self.table.schema, "table": self.table.name})
            seqs = dead_letters.column(change.SEQ).to_pylist()
            self._record_past(seq if already_applied else seq - 1, seqs, version=version)
            rows = with_causes(dead_letters, causes)
            content = encode_step(
                self.table,
                schema,
                seq,
                rows,
                sorted(cleared),
                superseded=sorted(superseded),
                origin=origin,
                replay_id=replay_id,
            )
            files.replace_durably(self._new_path(seq), content)

    def confirm_replay(self, replay_id: str, version: int | None) -> None:
        """Confirm that a replay was committed, in this version of the table if known.

        No other intent can be confirmed any more, so those are removed.
        """
        with files.explain_errors(self._path):
            for path, step in self._steps():
                if step.replay_id == replay_id:
                    self._record_past(step.counts_from_seq, (), version=version)
                    self._finalize(path, step)
                elif step.replay_id is not None:
                    path.unlink(missing_ok=True)

    def _finalize(self, path: LogPath, step: StepHeader) -> None:
        """Rewrite a step so that it counts unconditionally."""
        content = encode_step(
            self.table,
            TableSchema.from_json(step.schema),
            step.counts_from_seq,
            read_rows(path),
            step.cleared,
            superseded=step.superseded,
            origin=step.origin,
        )
        files.replace_durably(path, content)

    def _new_path(self, seq: int) -> LogPath:
        """Return an unused path for a step."""
        before = [path for path, step in self._steps() if step.counts_from_seq == seq]
        number = int(before[-1].stem.rpartition("-")[2]) + 1 if before else 0
        return self._path / f"{seq:020d}-{number:06d}.arrow"

    def discard_after(self, seq: int) -> None:
        """Remove steps of commits that do not exist or were undone. The table is at `seq`."""
        with files.explain_errors(self._path):
            for path, step in self._steps():
                if step.counts_from_seq > seq:
                    path.unlink(missing_ok=True)

    def remove_closed(self, seq: int) -> None:
        """Remove the oldest steps without open dead letters.

        Steps beyond `seq` are kept.
        """
        steps = self._counting(seq)
        owner = self._open(steps)
        with files.explain_errors(self._path):
            for path, step in steps:
                if any(owner.get(number) == path for number in step.dead_letters):
                    break
                path.unlink(missing_ok=True)
            for path, step in [] if owner else self._steps():
                if step.replay_id is not None:
                    path.unlink(missing_ok=True)
            if not self._steps():
                for path in self._path.glob("forgotten-*.json"):
                    path.unlink(missing_ok=True)

    # Loads.

    def before_load(self, load: str, *, whole: bool, now: str | None, seq: int, replay_id: str | None = None) -> None:
        """Prepare for a load that is about to be committed at this `_seq`.

        `now` and `replay_id` are the load and the last replay that the table records. A load of the whole table clears
        all steps.
        """
        self.recover(now, replay_id)
        if whole and (steps := [(path, step) for path, step in self._steps() if step.load != load]):
            self._record_past(seq, (), load=load)
            self._record("load.json", {"load": load, "steps": [path.name for path, _ in steps]})

    def supersede_by_load(self, load: str, schema: TableSchema, seq: int) -> None:
        """Mark all open dead letters as superseded by an upcoming load commit.

        Such a load writes every row as it is now, but not its past. The dead letters stay, and are superseded once the
        table is from that load. May be repeated after `before_load`.
        """
        if not (owner := self._open(self._steps())):
            return
        with files.explain_errors(self._path):
            no_rows = with_causes(schema.change_schema().empty_table(), [])
            content = encode_step(self.table, schema, seq, no_rows, (), load, superseded=sorted(owner))
            files.replace_durably(self._new_path(seq), content)

    def cleared_by(self, load: str | None) -> tuple[str, ...]:
        """Return the steps that were cleared by the load that the table is from."""
        stored = self._stored("load.json")
        return () if stored is None or stored["load"] != load else tuple(stored["steps"])

    def write_load_rejects(
        self, load: str, seq: int, batches: Sequence[DeadLetterBatch], origin: DeadLetterOrigin | None = None
    ) -> None:
        """Write rows that a load, about to be committed at this `_seq`, could not write.

        All rows must have one schema. May be repeated.
        """
        files.make_folder(self._path)
        with files.explain_errors(self._path):
            if not (self._path / "table.json").exists():
                self._record("table.json", {"schema": self.table.schema, "table": self.table.name})
            dead_letters = pa.concat_tables([batch.rows for batch in batches])
            first = min([0, *self._numbers()]) - dead_letters.num_rows
            numbers = pa.array(range(first, first + dead_letters.num_rows), pa.int64())
            dead_letters = dead_letters.set_column(SEQ_INDEX, dead_letters.schema.field(SEQ_INDEX), numbers)
            self._record_past(seq, numbers.to_pylist())
            content = encode_step(self.table, batches[0].schema, seq, dead_letters, (), load, origin=origin)
            files.replace_durably(self._new_path(seq), content)

    def _numbers(self) -> Iterator[int]:
        """Yield all numbers of dead letters, past ones included as far as recorded."""
        for _, step in self._steps():
            yield from (*step.dead_letters, *step.cleared)
        for forgotten in self._path.glob("forgotten-*.json"):
            yield from (self._stored(forgotten.name) or {"seqs": []})["seqs"]

    def recover(self, load: str | None, replay_id: str | None = None) -> None:
        """Remove cleared steps, and steps of loads that were not committed.

        The steps of the table's own load count from now on, whatever is loaded later, unless they are cleared. So does
        a replay intent whose id the table has.
        """
        cleared = self.cleared_by(load)
        with files.explain_errors(self._path):
            for path, step in self._steps():
                if path.name in cleared or step.load not in (None, load):
                    path.unlink(missing_ok=True)
                elif step.load is not None or (step.replay_id is not None and step.replay_id == replay_id):
                    self._finalize(path, step)
            if cleared:
                (self._path / "load.json").unlink(missing_ok=True)

    # The past.

    @property
    def first_seq(self) -> int | None:
        """The approximate first `_seq` that was ever a dead letter; None without any."""
        stored = self._stored("past.json")
        return None if stored is None else int(stored["first"])

    def is_complete_at(self, seq: int, load: str | None, version: int) -> bool:
        """Return whether a version of the table lacks no row because of dead letters.

        The table was at `seq` and from `load` in that version.
        """
        stored = self._stored("past.json")
        if stored is None:
            return True
        after = seq > stored["last"] or (load is not None and stored.get("load") == load)
        repaired = seq == stored["last"] and stored.get("version") is not None and version >= stored["version"]
        return (after or repaired) and not self.count(seq, load)

    def _record_past(
        self, last: int, seqs: Sequence[int], *, load: str | None = None, version: int | None = None
    ) -> None:
        """Record that versions up to this `_seq` may lack rows.

        Complete again are versions from the load that has cleared the dead letters, and those from `version`, into
        which the rows were written.
        """
        before = self._stored("past.json") or {"first": last + 1, "last": last}
        first, last = min([before["first"], *seqs]), max(before["last"], last)
        self._record("past.json", {"first": first, "last": last, "load": load, "version": version})

    # Requests of people.

    def forget(self, seqs: Collection[int]) -> None:
        """Drop dead letters for good."""
        self._record(f"forgotten-{uuid.uuid4().hex[:12]}.json", {"seqs": sorted(seqs)})

    def request_replay(self) -> None:
        """Ask for a replay of the dead letters."""
        self._record("replay.json", {"asked_at": time.time()})

    @property
    def replay_requested_at(self) -> float | None:
        """Time of the replay request; None without one."""
        stored = self._stored("replay.json")
        return None if stored is None else float(stored["asked_at"])

    def complete_replay_request(self, requested_at: float) -> None:
        """Remove the request after its replay, unless a newer request was made meanwhile."""
        if self.replay_requested_at == requested_at:
            (self._path / "replay.json").unlink(missing_ok=True)

    # Files.

    def _steps(self) -> list[tuple[LogPath, StepHeader]]:
        try:
            with files.explain_store_errors(self._path):
                names = sorted(entry.name for entry in self._path.iterdir() if entry.suffix == ".arrow")
        except (FileNotFoundError, NotADirectoryError):
            return []
        found = []
        for path in (self._path / name for name in names if name[0] != "."):
            with suppress(FileNotFoundError):  # the apply has removed it since
                found.append((path, read_step(path, files.read_stamp(path))))
        return found

    def _counting(self, seq: int, load: str | None = None) -> list[tuple[LogPath, StepHeader]]:
        steps = [(path, step) for path, step in self._steps() if step.counts_from_seq <= seq and step.replay_id is None]
        if load is not None:
            steps = [(path, step) for path, step in steps if step.load in (None, load)]
        cleared = self.cleared_by(load) if steps and load is not None else ()
        return [(path, step) for path, step in steps if path.name not in cleared]

    def _open(self, steps: list[tuple[LogPath, StepHeader]]) -> dict[int, LogPath]:
        """Map the open dead letters to the steps that they are in."""
        owner: dict[int, LogPath] = {}
        for path, step in steps:
            for number in step.cleared:
                owner.pop(number, None)
            owner.update(dict.fromkeys(step.dead_letters, path))
        for forgotten in self._path.glob("forgotten-*.json") if owner else ():
            for number in (self._stored(forgotten.name) or {"seqs": []})["seqs"]:
                owner.pop(number, None)
        return owner

    def _record(self, name: str, content: dict[str, Any]) -> None:
        files.make_folder(self._path)
        with files.explain_errors(self._path / name):
            files.replace_durably(self._path / name, json.dumps(content).encode())

    def _stored(self, name: str) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = json.loads((self._path / name).read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except files.STORE_ERRORS as error:
            raise files.explained_error(error, self._path) from error
        except (OSError, ValueError) as error:
            raise unreadable_error(self._path / name) from error
        return found


def may_have_dead_letters(log: LogPath, table: TableId) -> bool:
    """Return whether a table may have dead letters, for frequent callers.

    In an object store one listing serves all tables for a while.
    """
    if not files.is_remote(log):
        return True
    read_at, names = _tables_seen.get(log, (0.0, frozenset()))
    if time.monotonic() >= read_at + _SEEN_SECONDS:
        with files.explain_errors(log):
            read_at, names = _tables_seen[log] = (time.monotonic(), frozenset(files.list_names(log / FOLDER)))
    return table_token(table) in names


def tables_with_dead_letters(log: LogPath) -> list[TableId]:
    """Return the tables that have, or had, dead letters."""

    def found() -> Iterator[TableId]:
        for path in (log / FOLDER).glob("*/table.json"):
            with suppress(OSError, ValueError, KeyError):
                stored = json.loads(path.read_bytes())
                yield TableId.from_json(stored)

    return sorted(found())
