"""A log's whole life, told again and again with one call to the disk failing, each time another one.

Run as a program with the library of `failing_disk` (see `main`). It ends well if every life did: whatever failed was
told by an error with a hint, the next start went on by itself, every row is there once, nothing is left over, and at no
time would a power cut have cost what the source had been told to forget.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa

from tailrace.changelog.maintain.retention import RetentionPolicy, trim
from tailrace.changelog.maintain.seal_contents import SealLimits
from tailrace.changelog.maintain.sealer import Sealer
from tailrace.changelog.read import consumers
from tailrace.changelog.read.reader import ChangeLog
from tailrace.changelog.write.writer import LogWriter
from tailrace.errors import LogError
from tailrace.model import change
from tailrace.model.batch import ChangeBatch, Window
from tailrace.model.position import ZERO, Lsn
from tests.support.changes import SHOP, insert, table_schema
from tests.support.failing_disk import Call, Disk
from tests.support.logs import assert_nothing_left_over
from tests.support.windows import SOURCE, batch, finishing_window, ids, named, open_window, rows_window, window

OTHER = named("public", "other", 2)
ALTERED = table_schema({"id": pa.int64(), "name": pa.string()})
"""The shop, after it has lost some columns."""
READ = 4
"""The commit up to which nobody needs the rows any more."""
LIMITS = SealLimits(commits=2, merge_count=2)


def part(first: int, *keys: int) -> ChangeBatch:
    """Rows from the middle of a transaction."""
    made = batch(SHOP, *[insert(key) for key in keys])
    place = made.data.schema.get_field_index(change.TX_INDEX)
    counted = pa.array(range(first, first + len(keys)), pa.int32())
    return replace(made, data=made.data.set_column(place, made.data.schema.field(place), counted))


EARLY: tuple[Window, ...] = (
    window(0, 100),
    rows_window(100, 200, 1, 2),
    rows_window(200, 300, 3, schema=OTHER),
    open_window(300, part(0, 4, 5)),
    open_window(300, part(2, 6), continues=True),
    finishing_window(300, 400, part(3, 7)),
)
LATE: tuple[Window, ...] = (
    rows_window(400, 500, 8, schema=ALTERED),
    window(500, 600),
    rows_window(600, 700, 9, 10, schema=OTHER),
)
ROWS = [(n, n) for n in range(1, 11)]
ROWS_NOT_READ = [pair for pair in ROWS if pair[0] > 7]


@dataclass
class Life:
    """One log, and what is known of it from outside."""

    disk: Disk
    log: Path
    told: Lsn = ZERO
    """What the source was told to forget."""
    reader: ChangeLog | None = None
    """One that came early and stays."""
    read: list[tuple[int, object]] = field(default_factory=list)
    reached: int = 0
    careful: bool = False
    """Whether to look at every turn what a power cut would leave."""

    def capture(self, windows: tuple[Window, ...]) -> None:
        writer = LogWriter(self.log, SOURCE)
        try:
            self.tell(writer.position)
            for coming in windows:
                if coming.start >= writer.position:
                    if writer.append(coming) is not None:
                        self.tell(writer.position)
                    self.follow()
        finally:
            writer.close()

    def tell(self, position: Lsn) -> None:
        """The source is told that it may forget; a reader looks what there is."""
        self.told = position
        if self.careful:
            self.survive()

    def follow(self) -> None:
        self.reader = self.reader or ChangeLog.open(self.log)
        newest = self.reader.newest()
        self.read += ids(list(self.reader.read(self.reached + 1, newest)))
        self.reached = newest

    def seal(self) -> None:
        with Sealer(self.log, limits=LIMITS) as sealer:
            sealer.seal()
            sealer.merge_seals()
            sealer.clean(0.0)
        if self.careful:
            self.survive()

    def trim(self) -> None:
        place = consumers.Consumer.open(self.log, "reader", wanted=None, start=(READ, 0))
        place.save()
        with Sealer(self.log, limits=LIMITS) as sealer:
            trim(sealer, RetentionPolicy(age_seconds=0.0))
        if self.careful:
            self.survive()

    def survive(self) -> None:
        """The power is cut and comes back: all that the source was told to forget is in the log."""
        left = self.log.parent.with_name("left")
        self.disk.after_power_cut(left)
        for record in (left / self.log.name).glob("*.json"):
            if record.name not in ("meta.json", "trimmed.json"):
                record.unlink()  # who held a lease; a torn one is waited for, and that takes long
        again = LogWriter(left / self.log.name, SOURCE)
        again.close()
        assert again.position >= self.told, f"lost: {again.position} of {self.told}"
        kept = ChangeLog.open(left / self.log.name)
        trimmed = bool(kept.trimmed().tables)
        found = ids(list(kept.follow(READ if trimmed else 0)))
        wanted = ROWS_NOT_READ if trimmed else ROWS
        assert found == [pair for pair in wanted if pair[0] < again.next_seq], found


def turns(life: Life) -> tuple[Callable[[], None], ...]:
    return (lambda: life.capture(EARLY), life.seal, lambda: life.capture((*EARLY, *LATE)), life.seal, life.trim)


def live(life: Life) -> int:
    """Tell it to the end; what fails is tried again as soon as the disk is well. Returns how often that was."""
    failed = 0
    for turn in turns(life):
        try:
            turn()
        except LogError as error:
            failed += 1
            if not error.hint:
                raise
            life.disk.heal()
            before, life.careful = life.careful, True  # where a failure was, a claim may be wrong
            turn()
            life.careful = before
    return failed


def check(life: Life) -> None:
    life.follow()
    assert life.read == ROWS, life.read
    kept = ChangeLog.open(life.log)
    assert ids(list(kept.follow(READ))) == ROWS_NOT_READ
    assert kept.trimmed().tables, "nothing was let go of"
    # What could not be removed is swept by those who come next.
    writer = LogWriter(life.log, SOURCE)
    writer.append(window(700, 800))
    writer.close()
    life.seal()
    assert_nothing_left_over(life.log)


def tell(top: Path, calls: Call, nth: int, error: int, *, lasting: bool) -> tuple[int, int]:
    """One life: how many of the calls there were, and how often it failed."""
    folder = top / "disk"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    disk = Disk(folder, top / "trace")
    life = Life(disk, folder / "log", careful=not nth)
    disk.fail(calls, nth, error, lasting=lasting)
    failed = live(life)
    calls_made = disk.heal()
    check(life)
    return calls_made, failed


def main(arguments: list[str]) -> None:
    """FOLDER CALLS ERROR LASTING LIVES SEED: so many of the calls fail, in a life each, spread evenly."""
    top, calls, error, lasting = (Path(arguments[0]), Call(int(arguments[1])), int(arguments[2]), arguments[3] == "1")
    made, _ = tell(top, calls, 0, error, lasting=False)
    step = max(1, made // int(arguments[4]))
    lived = failed = 0
    for nth in range(1 + int(arguments[5]) % step, made + 1, step):
        try:
            failed += tell(top, calls, nth, error, lasting=lasting)[1]
        except BaseException as failure:
            failure.add_note(f"call {nth} of {made} failed: {calls!r} with {error}")
            raise
        lived += 1
    print(lived, failed)


if __name__ == "__main__":
    main(sys.argv[1:])
