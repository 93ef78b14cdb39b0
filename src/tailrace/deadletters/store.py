"""Dead letters: changes that a lake table could not take, below `<log>/dead/<table>/`, until somebody sees to them.

    table.json              which table it is
    <seq>-<n>.arrow         a step: letters, each with its payload and cause, and which earlier ones it clears; or rows
                            that a load could not bring, which count once the table came from that load; or a promise
    load.json               a load of the whole table is about to land: what it clears
    forgotten-<id>.json     letters that a person has dropped
    replay.json             a person asks for them to be tried again
    past.json               which versions of the table may lack what was in letters

A step is written before the table's own commit and named by the `_seq` that it reaches: it counts once the table is
there. So a letter is never lost, and what a crash left of a commit that was not made is void. The same change is one
letter, known by its `_seq`; a row that a load has read is known by a number below zero, given when the load lands.
A step may say of letters that they have *passed*: they stay open, but nothing builds on what they hold any more.
A step may be a *promise* to clear letters whose own changes are about to come into the table, and has a name. The
commit that brings them bears it, so a promise counts once somebody has found that the table does (`settle`). One
that was not kept stays until another is: whoever made it may still be at it.
Payloads are copies: what the log lets go of does not matter here.

Whoever looks says where the table is, and which load it came from: what that has cleared is not there, also before the
next apply has removed it.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from tailrace.errors import LogCorrupt, TailraceError
from tailrace.model import change
from tailrace.model.schema import TableId, TableSchema, table_token
from tailrace.storage import files
from tailrace.storage.files import FileStamp, LogPath

FOLDER = "dead"
FORMAT = 1
_META = b"tailrace"
_STEPS_KNOWN_MAX = 4096
_SEEN_SECONDS = 2.0
_tables_seen: dict[LogPath, tuple[float, frozenset[str]]] = {}
LOOKS_MAX = 100
"""At steps that are removed by another process while they are read."""

CAUSE_CODE, CAUSE, HINT, REJECTED_AT = "_cause_code", "_cause", "_hint", "_set_aside_at"
CAUSE_FIELDS = (
    pa.field(CAUSE_CODE, pa.string()), pa.field(CAUSE, pa.string()), pa.field(HINT, pa.string()),
    pa.field(REJECTED_AT, pa.timestamp("us", "UTC")),
)  # fmt: skip
"""What a letter has beside the columns of a change. A step has them first, so no column of a table meets them."""


_SEQ_PLACE = len(CAUSE_FIELDS) + [field.name for field in change.REQUIRED].index(change.SEQ)


class DeadLetterOrigin(NamedTuple):
    """What rows that a load has brought say of where they come from, so that those that it could not bring say it too
    when they come later."""

    seq: int
    position: str


@dataclass(frozen=True, kw_only=True)
class DeadLetterBatch:
    """Letters of one shape, in `_seq` order: `CAUSE_FIELDS`, then the columns of a change."""

    schema: TableSchema
    rows: pa.Table
    origin: DeadLetterOrigin | None = None

    @property
    def changes(self) -> pa.Table:
        return self.rows.select(range(len(CAUSE_FIELDS), self.rows.num_columns))

    @property
    def seqs(self) -> list[int]:
        found: list[int] = self.changes.column(change.SEQ).to_pylist()
        return found


@dataclass(frozen=True, kw_only=True)
class _StepHeader:
    """What a step says without its payloads."""

    counts_from_seq: int
    dead_letters: tuple[int, ...]
    cleared: tuple[int, ...]
    schema: dict[str, Any]
    load: str | None = None
    """Whose rows they are: it counts only for a table that came from this load."""
    superseded: tuple[int, ...] = ()
    origin: DeadLetterOrigin | None = None
    replay_id: str | None = None
    """Of a promise, its name."""


class DeadLetterStore:
    """The letters of one table. Plain: a task may have one too. Only whoever applies to the table writes steps."""

    def __init__(self, log: LogPath, table: TableId) -> None:
        self.table = table
        self._path = log / FOLDER / table_token(table)

    @property
    def has_any(self) -> bool:
        """Whether there is anything to look at; cheap where there is not."""
        return bool(self._steps())

    def count(self, seq: int, load: str | None = None) -> int:
        """How many are open for a table that has come to this `_seq`, from this load if it has a name."""
        return len(self._open(self._counting(seq, load)))

    def read_open(
        self, seq: int, load: str | None = None, *, only: Collection[int] | None = None
    ) -> list[DeadLetterBatch]:
        """Those that are, or some of them, each with its payload and its newest cause."""
        return self._bundles(seq, load, only)

    def read_open_keys(self, seq: int, load: str | None = None) -> list[DeadLetterBatch]:
        """Those that have not passed, with no column of the table but its key: payloads may be large."""
        passed, waiting = self.superseded(seq, load), None
        if passed:
            waiting = {number for number in self._open(self._counting(seq, load)) if number not in passed}
        found = self._bundles(seq, load, waiting)
        return [replace(bundle, rows=bundle.rows.select(_key_places(bundle.schema, bundle.rows))) for bundle in found]

    def superseded(self, seq: int, load: str | None = None) -> frozenset[int]:
        """Letters, open or not, that nothing builds on any more."""
        return frozenset(number for _, step in self._counting(seq, load) for number in step.superseded)

    def _bundles(self, seq: int, load: str | None, only: Collection[int] | None) -> list[DeadLetterBatch]:
        for _ in range(LOOKS_MAX):
            with suppress(FileNotFoundError):  # whoever applies has removed a step since: what is there now?
                return list(self._read(seq, load, only))
        raise _unreadable(self._path)

    def _read(self, seq: int, load: str | None, only: Collection[int] | None) -> Iterator[DeadLetterBatch]:
        steps = self._counting(seq, load)
        owner = self._open(steps)
        for path, step in steps:
            mine = [
                number for number in step.dead_letters if owner.get(number) == path and (only is None or number in only)
            ]
            if mine:
                rows = _read_rows(path)
                places = np.flatnonzero(np.isin(rows.column(_SEQ_PLACE).to_numpy(), np.array(mine, np.int64)))
                whole = len(places) == rows.num_rows
                rows = rows if whole else rows.take(pa.array(places))
                yield DeadLetterBatch(schema=TableSchema.from_json(step.schema), rows=rows, origin=step.origin)

    def write(
        self,
        shape: TableSchema,
        reaches: int,
        letters: pa.Table,
        causes: Sequence[TailraceError],
        cleared: Collection[int],
        *,
        passed: Collection[int] = (),
        there: bool = False,
        version: int | None = None,
        origin: DeadLetterOrigin | None = None,
        late: str | None = None,
    ) -> None:
        """A step that counts once the table has come to `reaches`; durable when this returns.

        With `there` it has, and rows were put in where it stands: a version of before has the same `_seq`. Which one
        has them is `version`, if that is known. With a name it is a promise, and counts once that is kept.
        """
        files.make_folder(self._path)
        with files.explain_errors(self._path):
            if not (self._path / "table.json").exists():
                self._record("table.json", {"schema": self.table.schema, "table": self.table.name})
            seqs = letters.column(change.SEQ).to_pylist()
            self._note_past(reaches if there else reaches - 1, seqs, version=version)
            told = with_causes(letters, causes)
            content = _encoded(
                self.table, shape, reaches, told, sorted(cleared), passed=sorted(passed), origin=origin, late=late
            )
            files.replace_durably(self._next(reaches), content)

    def confirm_replay(self, late: str, version: int | None) -> None:
        """A promise was kept, in this version of the table if that is known: no other can be any more."""
        with files.explain_errors(self._path):
            for path, step in self._steps():
                if step.replay_id == late:
                    self._note_past(step.counts_from_seq, (), version=version)
                    self._settled(path, step)
                elif step.replay_id is not None:
                    path.unlink(missing_ok=True)

    def _settled(self, path: LogPath, step: _StepHeader) -> None:
        """Have a step count whatever comes."""
        content = _encoded(
            self.table,
            TableSchema.from_json(step.schema),
            step.counts_from_seq,
            _read_rows(path),
            step.cleared,
            passed=step.superseded,
            origin=step.origin,
        )
        files.replace_durably(path, content)

    def _next(self, reaches: int) -> LogPath:
        """A step's name that none has."""
        before = [path for path, step in self._steps() if step.counts_from_seq == reaches]
        number = int(before[-1].stem.rpartition("-")[2]) + 1 if before else 0
        return self._path / f"{reaches:020d}-{number:06d}.arrow"

    def discard_after(self, seq: int) -> None:
        """Remove the steps of commits that were not made, or were taken back: the table is at `seq`."""
        with files.explain_errors(self._path):
            for path, step in self._steps():
                if step.counts_from_seq > seq:
                    path.unlink(missing_ok=True)

    def remove_closed(self, seq: int) -> None:
        """Remove the oldest steps of which nothing is open. Those of the future are left alone."""
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

    def before_load(self, load: str, *, whole: bool, now: str | None, seq: int, late: str | None = None) -> None:
        """A load is about to land at this `_seq` in a table that came from the load `now`, and bears the name of a
        promise if one was kept last; a whole one clears what is here."""
        self.recover(now, late)
        if whole and (steps := [(path, step) for path, step in self._steps() if step.load != load]):
            self._note_past(seq, (), load=load)
            self._record("load.json", {"load": load, "steps": [path.name for path, _ in steps]})

    def supersede_by_load(self, load: str, shape: TableSchema, reaches: int) -> None:
        """A load is about to land that brings every row as it is now, and not what it was: the letters of before stay,
        and have passed once the table came from that load. May be repeated after `before_load`."""
        if not (owner := self._open(self._steps())):
            return
        with files.explain_errors(self._path):
            none = with_causes(shape.change_schema().empty_table(), [])
            content = _encoded(self.table, shape, reaches, none, (), load, passed=sorted(owner))
            files.replace_durably(self._next(reaches), content)

    def cleared_by(self, load: str | None) -> tuple[str, ...]:
        """The steps that the load has cleared which the table came from."""
        stored = self._stored("load.json")
        return () if stored is None or stored["load"] != load else tuple(stored["steps"])

    def write_load_rejects(
        self, load: str, reaches: int, rows: Sequence[DeadLetterBatch], origin: DeadLetterOrigin | None = None
    ) -> None:
        """Rows that a load, which is about to land at this `_seq`, could not bring; of one shape. May be repeated."""
        files.make_folder(self._path)
        with files.explain_errors(self._path):
            if not (self._path / "table.json").exists():
                self._record("table.json", {"schema": self.table.schema, "table": self.table.name})
            letters = pa.concat_tables([bundle.rows for bundle in rows])
            first = min([0, *self._numbers()]) - letters.num_rows
            numbers = pa.array(range(first, first + letters.num_rows), pa.int64())
            letters = letters.set_column(_SEQ_PLACE, letters.schema.field(_SEQ_PLACE), numbers)
            self._note_past(reaches, numbers.to_pylist())
            content = _encoded(self.table, rows[0].schema, reaches, letters, (), load, origin=origin)
            files.replace_durably(self._next(reaches), content)

    def _numbers(self) -> Iterator[int]:
        """All that letters have, or had as far as that is told."""
        for _, step in self._steps():
            yield from (*step.dead_letters, *step.cleared)
        for forgotten in self._path.glob("forgotten-*.json"):
            yield from (self._stored(forgotten.name) or {"seqs": []})["seqs"]

    def recover(self, load: str | None, late: str | None = None) -> None:
        """Remove what the load that the table came from has cleared, and what is of a load that came to nothing. What
        that load itself has left counts from here on whatever is loaded later, as far as that does not clear it; and
        so does a promise whose name the table bears."""
        cleared = self.cleared_by(load)
        with files.explain_errors(self._path):
            for path, step in self._steps():
                if path.name in cleared or step.load not in (None, load):
                    path.unlink(missing_ok=True)
                elif step.load is not None or (step.replay_id is not None and step.replay_id == late):
                    self._settled(path, step)
            if cleared:
                (self._path / "load.json").unlink(missing_ok=True)

    # What was.

    @property
    def first_seq(self) -> int | None:
        """The first `_seq` that ever was one, about; None: the table never had any."""
        stored = self._stored("past.json")
        return None if stored is None else int(stored["first"])

    def is_complete_at(self, seq: int, load: str | None, version: int) -> bool:
        """Whether a version of the table, which stood there, lacks nothing that ever was in letters."""
        stored = self._stored("past.json")
        if stored is None:
            return True
        after = seq > stored["last"] or (load is not None and stored.get("load") == load)
        put = seq == stored["last"] and stored.get("version") is not None and version >= stored["version"]
        return (after or put) and not self.count(seq, load)

    def _note_past(
        self, last: int, seqs: Sequence[int], *, load: str | None = None, version: int | None = None
    ) -> None:
        """Versions up to this `_seq` may lack something, but for what came from the load that has cleared it, and for
        the version that rows were put into and those after it."""
        before = self._stored("past.json") or {"first": last + 1, "last": last}
        first, last = min([before["first"], *seqs]), max(before["last"], last)
        self._record("past.json", {"first": first, "last": last, "load": load, "version": version})

    # What people ask for.

    def forget(self, seqs: Collection[int]) -> None:
        """Drop letters for good."""
        self._record(f"forgotten-{uuid.uuid4().hex[:12]}.json", {"seqs": sorted(seqs)})

    def request_replay(self) -> None:
        """Ask for the letters to be tried again."""
        self._record("replay.json", {"asked_at": time.time()})

    @property
    def replay_requested_at(self) -> float | None:
        """When that was; None: nobody asks."""
        stored = self._stored("replay.json")
        return None if stored is None else float(stored["asked_at"])

    def complete_replay_request(self, asked: float) -> None:
        """They were tried. Who has asked again meanwhile is not answered by that."""
        if self.replay_requested_at == asked:
            (self._path / "replay.json").unlink(missing_ok=True)

    # Files.

    def _steps(self) -> list[tuple[LogPath, _StepHeader]]:
        try:
            with files.explain_store_errors(self._path):
                names = sorted(entry.name for entry in self._path.iterdir() if entry.suffix == ".arrow")
        except (FileNotFoundError, NotADirectoryError):
            return []
        found = []
        for path in (self._path / name for name in names if name[0] != "."):
            with suppress(FileNotFoundError):  # whoever applies has removed it since
                found.append((path, _read_step(path, files.read_stamp(path))))
        return found

    def _counting(self, seq: int, load: str | None = None) -> list[tuple[LogPath, _StepHeader]]:
        steps = [(path, step) for path, step in self._steps() if step.counts_from_seq <= seq and step.replay_id is None]
        if load is not None:
            steps = [(path, step) for path, step in steps if step.load in (None, load)]
        cleared = self.cleared_by(load) if steps and load is not None else ()
        return [(path, step) for path, step in steps if path.name not in cleared]

    def _open(self, steps: list[tuple[LogPath, _StepHeader]]) -> dict[int, LogPath]:
        """The open letters, and which step each stands in."""
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
            raise _unreadable(self._path / name) from error
        return found


def may_have_dead_letters(log: LogPath, table: TableId) -> bool:
    """Whether a table may have letters, for those who ask often: in a store one look serves all tables for a while."""
    if not files.is_remote(log):
        return True
    looked, names = _tables_seen.get(log, (0.0, frozenset()))
    if time.monotonic() >= looked + _SEEN_SECONDS:
        with files.explain_errors(log):
            looked, names = _tables_seen[log] = (time.monotonic(), frozenset(files.list_names(log / FOLDER)))
    return table_token(table) in names


def tables_with_dead_letters(log: LogPath) -> list[TableId]:
    """The tables that have, or had, dead letters."""

    def found() -> Iterator[TableId]:
        for path in (log / FOLDER).glob("*/table.json"):
            with suppress(OSError, ValueError, KeyError):
                stored = json.loads(path.read_bytes())
                yield TableId.from_json(stored)

    return sorted(found())


def with_causes(letters: pa.Table, causes: Sequence[TailraceError]) -> pa.Table:
    """Changes as letters: why each was set aside, and when, stands first."""
    said = [
        pa.array([cause.code for cause in causes], pa.string()),
        pa.array([cause.headline for cause in causes], pa.string()),
        pa.array([cause.hint for cause in causes], pa.string()),
        pa.array([time.time_ns() // 1000] * len(causes), pa.timestamp("us", "UTC")),
    ]
    return pa.Table.from_arrays([*said, *letters.columns], schema=pa.schema([*CAUSE_FIELDS, *letters.schema]))


def encode_dead_letters(shape: TableSchema, letters: pa.Table) -> bytes:
    """Letters that no step has yet, as a file."""
    return _encoded(shape.table, shape, 0, letters, ())


def read_dead_letters(path: LogPath) -> DeadLetterBatch:
    """What such a file holds."""
    return DeadLetterBatch(
        schema=TableSchema.from_json(_read_step(path, files.read_stamp(path)).schema), rows=_read_rows(path)
    )


def _encoded(
    table: TableId,
    shape: TableSchema,
    reaches: int,
    letters: pa.Table,
    cleared: Sequence[int],
    load: str | None = None,
    *,
    passed: Sequence[int] = (),
    origin: DeadLetterOrigin | None = None,
    late: str | None = None,
) -> bytes:
    meta = {
        "format": FORMAT,
        "schema": table.schema,
        "table": table.name,
        "reaches": reaches,
        "shape": shape.to_json(),
        "letters": letters.column(_SEQ_PLACE).to_pylist(),
        "cleared": [int(number) for number in cleared],
        **({} if load is None else {"load": load}),
        **({"passed": [int(number) for number in passed]} if passed else {}),
        **({} if origin is None else {"origin": list(origin)}),
        **({} if late is None else {"late": late}),
    }
    fields = letters.schema.with_metadata({_META: json.dumps(meta).encode()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, fields) as writer:
        writer.write_table(letters.replace_schema_metadata(fields.metadata))
    content: bytes = sink.getvalue().to_pybytes()
    return content


@lru_cache(maxsize=_STEPS_KNOWN_MAX)
def _read_step(path: LogPath, _: FileStamp | None) -> _StepHeader:
    """Kept by the file's identity: status asks twice a second."""
    try:
        with files.arrow_file(path) as handle:
            stored = json.loads(pa.ipc.open_file(handle).schema.metadata[_META])
        if stored["format"] != FORMAT:
            raise ValueError("it has a format this version does not know")
        return _StepHeader(
            counts_from_seq=stored["reaches"],
            dead_letters=tuple(stored["letters"]),
            cleared=tuple(stored["cleared"]),
            schema=stored["shape"],
            load=stored.get("load"),
            superseded=tuple(stored.get("passed", ())),
            replay_id=stored.get("late"),
            origin=DeadLetterOrigin(*stored["origin"]) if "origin" in stored else None,
        )
    except FileNotFoundError:
        raise
    except files.STORE_ERRORS as error:
        raise files.explained_error(error, path) from error
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise _unreadable(path) from error


def _read_rows(path: LogPath) -> pa.Table:
    try:
        return pa.ipc.open_file(files.arrow_file(path)).read_all()  # only what is looked at is read
    except FileNotFoundError:
        raise
    except files.STORE_ERRORS as error:
        raise files.explained_error(error, path) from error
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path) from error


def _key_places(shape: TableSchema, rows: pa.Table) -> list[int]:
    """Where a letter's cause, what every change has, its key and what of it does not fit stand."""
    always = len(CAUSE_FIELDS) + len(change.REQUIRED)
    wanted = {change.UNFIT, *(change.stored_name(name) for name in shape.key)}
    return [*range(always), *(i for i in range(always, rows.num_columns) if rows.schema.field(i).name in wanted)]


def _unreadable(path: LogPath) -> LogCorrupt:
    return LogCorrupt(
        "a dead letter cannot be read",
        path=path,
        hint="Restore the file from a copy of the log; or move it away and run `tailrace snapshot FILE TABLE`.",
    )
