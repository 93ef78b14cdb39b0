"""Any order of work on a log keeps every row for every reader.

Each reader gets every row once, or an error for trimmed ones.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa
import pytest

from tailrace.changelog.maintain.retention import RetentionPolicy, trim
from tailrace.changelog.maintain.seal_contents import SealLimits
from tailrace.changelog.maintain.seal_writer import SealFileSizes
from tailrace.changelog.maintain.sealer import Sealer
from tailrace.changelog.read.consumers import TableProgress, write_table_progress
from tailrace.changelog.read.index import LogIndex
from tailrace.changelog.read.reader import ChangeLog
from tailrace.errors import LogTrimmed
from tailrace.model.batch import ChangeBatch
from tailrace.model.position import Lsn
from tailrace.model.schema import Column, TableSchema
from tests.support.changes import SHOP, Change, insert, move, truncate
from tests.support.logs import OTHER, STEP, THIRD, Diary, Given, Noted, assert_nothing_left_over, in_order, rows_of

ROUNDS = int(os.environ.get("TAILRACE_SOAK_ROUNDS", "0"))
SEEDS = range(3 + 20 * ROUNDS)
STEPS = 200
WIDER = replace(OTHER, columns=(*OTHER.columns, Column(name="added", source_type="int", type=pa.int32())))
TABLES = (SHOP, OTHER, THIRD)
LATER = 4e9


@dataclass
class Follower:
    """A reader that reads at its own pace."""

    batches: Iterator[ChangeBatch]
    table: TableSchema | None
    first: int
    """The commit after which it reads."""
    seen: set[int] = field(default_factory=set)


class Story:
    """One sequence of work on a log, and the invariants after each step."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.chance = random.Random(seed)
        self.diary = Diary(folder)
        self.path = folder
        self.log = ChangeLog.open(folder)
        self.index = LogIndex(self.log)
        self.followers: list[Follower] = []
        self.numbers: dict[int, int] = {}
        self.held: dict[int, tuple[int, int]] = {}
        self.consumed: dict[int, int] = {}
        self.other = OTHER
        self.key = 0

    # Work.

    def given(self) -> list[Given]:
        tables = self.chance.sample([SHOP, self.other, THIRD], self.chance.randint(0, 3))
        return [(schema, self.rows()) for schema in tables]

    def rows(self) -> list[Change]:
        made: list[Change] = []
        for _ in range(self.chance.randint(1, 3)):
            self.key += 1
            kind = self.chance.random()
            if kind < 0.8:
                made.append(insert(self.key, name=f"n{self.key}"))
            elif kind < 0.95:
                made += move(self.key, -self.key, unchanged=("big",))
            else:
                made.append(truncate())
        return made

    def append(self) -> None:
        self.diary.commit(*self.given())
        self.number()

    def large(self) -> None:
        for _ in range(self.chance.randint(1, 3)):
            if given := self.given():
                self.diary.piece(*given)
        if self.diary._pieces and self.chance.random() < 0.7:
            self.diary.finish(*self.given())
            self.number()

    def widen(self) -> None:
        self.other = WIDER if self.other == OTHER else OTHER

    def number(self) -> None:
        """Return the log's numbers of the tables, as far as they have one."""
        self.log.schemas.load()
        for schema in TABLES:
            for number in self.log.schemas.numbers_named(schema.table):
                self.numbers[schema.relation] = number

    def reopen(self) -> None:
        self.diary.reopen()

    def sealer(self) -> Sealer:
        sizes = SealFileSizes(group_rows=self.chance.choice([1, 3, 100]), file_bytes=self.chance.choice([1, 1 << 20]))
        return Sealer(
            self.path,
            limits=SealLimits(
                commits=self.chance.choice([1, 2, 5, 100]),
                merge_count=self.chance.choice([2, 3]),
                file_sizes=sizes,
                small_bytes=self.chance.choice([0, 1 << 20]),
            ),
        )

    def seal(self) -> None:
        with self.sealer() as sealer:
            sealer.seal()

    def join(self) -> None:
        with self.sealer() as sealer:
            sealer.merge_seals()

    def clean(self) -> None:
        with self.sealer() as sealer:
            sealer.clean(self.chance.choice([0.0, 300.0]))

    def hold(self) -> None:
        """Report that a table has covered everything up to a commit; never less than before."""
        schema = self.chance.choice(TABLES)
        number = self.numbers.get(schema.relation)
        if number is None:
            return
        commit = self.chance.randint(self.held.get(number, (0, 0))[0], self.diary.writer.commit)
        seq = max((item.row.seq for item in self.diary.noted if item.commit <= commit), default=0)
        self.held[number] = (commit, seq)
        tables = {self.numbers[known.relation]: known.table for known in TABLES if known.relation in self.numbers}
        write_table_progress(
            self.path,
            [
                TableProgress(table=tables[number], numbers=(number,), commit=commit, seq=seq)
                for number, (commit, seq) in self.held.items()
            ],
        )

    def trim(self) -> None:
        before = self.log.trimmed()
        size = self.chance.choice([None, None, 20_000])
        age = None if size else 0.0
        with self.sealer() as sealer:
            trim(sealer, RetentionPolicy(age_seconds=age, bytes=size), now=LATER)
        gone = self.log.trimmed()
        assert gone.commit >= before.commit
        for number, (commit, seq) in self.held.items():
            was, now = before.tables.get(number), gone.tables.get(number)
            if now is not None and now != was and (was is None or was.last_seq <= seq or was.commit <= commit):
                assert now.last_seq <= seq or now.commit <= commit, "rows that a table needs are trimmed"

    # Reads.

    def wanted(self, after: int, table: TableSchema | None) -> list[Noted]:
        return [
            item
            for item in self.diary.noted
            if item.commit > after and (table is None or item.row.schema.relation == table.relation)
        ]

    def is_gone(self, item: Noted) -> bool:
        return self.log.trimmed().is_trimmed(self.numbers[item.row.schema.relation], item.row.seq)

    def some_table(self) -> TableSchema | None:
        known = [schema for schema in TABLES if schema.relation in self.numbers]
        return self.chance.choice([None, *known])

    def read(self) -> None:
        after, table = self.chance.randint(0, self.diary.writer.commit), self.some_table()
        log = self.chance.choice([self.log, ChangeLog.open(self.path)])
        asked = None if table is None else table.table
        wanted = self.wanted(after, table)
        if any(self.is_gone(item) for item in wanted):
            with pytest.raises(LogTrimmed):
                list(log.follow(after, table=asked))
            if after * STEP >= log.trimmed().position.value:
                with pytest.raises(LogTrimmed):
                    list(log.follow(Lsn(after * STEP), table=asked))
        else:
            expected = [item.row for item in wanted]
            assert in_order(rows_of(log.follow(after, table=asked))) == expected
            if after * STEP >= log.trimmed().position.value:
                found = rows_of(log.follow(Lsn(after * STEP), table=asked))
                assert in_order(found) == expected
        kept = [item.row for item in self.wanted(0, table) if not self.is_gone(item)]
        assert in_order(rows_of(log.follow(table=asked))) == kept

    def consume(self) -> None:
        """Let a named reader read a little and stop.

        It continues where it stopped, or one batch before.
        """
        table = self.some_table()
        if table is None:
            return
        whole = [item.row for item in self.wanted(0, table)]
        gone = sum(self.is_gone(item) for item in self.wanted(0, table))
        known = self.consumed.get(table.relation, gone)
        follower = self.log.follow(table=table.table, consumer=str(table.table), expires_seconds=None)
        rows = rows_of(itertools.islice(follower, self.chance.randint(0, 3)))
        del follower
        if rows:
            begun = whole.index(rows[0])
            assert begun <= known, "skipped rows"
            assert rows == whole[begun : begun + len(rows)]
            self.consumed[table.relation] = max(known, begun + len(rows))

    def begin(self) -> None:
        table = self.some_table()
        first = self.chance.randint(self.log.trimmed().commit, self.diary.writer.commit)
        asked = None if table is None else table.table
        batches = ChangeLog.open(self.path).follow(first, table=asked, wait_seconds=None)
        self.followers.append(Follower(batches, table, first))

    def advance(self, batches: int | None = None) -> None:
        if not self.followers:
            return
        follower = self.chance.choice(self.followers)
        for _ in range(batches or self.chance.randint(1, 4)):
            due = [item for item in self.wanted(follower.first, follower.table) if item.row.seq not in follower.seen]
            if not due:
                return
            try:
                rows = rows_of([next(follower.batches)])
            except LogTrimmed:
                assert any(self.is_gone(item) for item in due), "an error for rows that exist"
                self.followers.remove(follower)
                return
            mine = [item for item in due if item.row.schema.relation == rows[0].schema.relation]
            assert rows == [item.row for item in mine[: len(rows)]], "not the next rows of this table"
            # With many tables a commit is complete before the next begins.
            before = [item for item in due if item.commit < mine[0].commit]
            assert not before, "skipped rows"
            follower.seen |= {row.seq for row in rows}

    def look(self) -> None:
        self.index.grow()
        index = self.index
        writer = self.diary.writer
        assert (index.last_commit, index.position, index.rows) == (
            writer.commit,
            writer.position,
            len(self.diary.noted),
        )
        for schema in TABLES:
            number = self.numbers.get(schema.relation)
            if number is not None:
                assert index.rows_captured(number) == len(self.diary.rows(schema=schema))
                kept = [item for item in self.wanted(0, schema) if not self.is_gone(item)]
                assert sum(item.rows for item in index.pending(number, 0, index.last_commit)) == len(kept)

    def play(self, steps: int) -> None:
        kinds: list[tuple[Callable[[], None], int]] = [
            (self.append, 12),
            (self.large, 3),
            (self.widen, 1),
            (self.reopen, 1),
            (self.seal, 4),
            (self.join, 2),
            (self.clean, 3),
            (self.hold, 2),
            (self.trim, 2),
            (self.read, 4),
            (self.begin, 3),
            (self.advance, 8),
            (self.look, 2),
            (self.consume, 1),
        ]
        actions = [action for action, _ in kinds]
        weights = [weight for _, weight in kinds]
        for _ in range(steps):
            self.chance.choices(actions, weights)[0]()

    def end(self) -> None:
        while self.followers:
            follower = self.followers[0]
            self.chance.shuffle(self.followers)
            self.advance(1000)
            due = [item for item in self.wanted(follower.first, follower.table) if item.row.seq not in follower.seen]
            if not due and follower in self.followers:
                self.followers.remove(follower)
        self.diary.commit()
        with Sealer(self.path) as sealer:
            sealer.seal()
            sealer.merge_seals()
            sealer.clean(0)
        self.diary.close()
        assert_nothing_left_over(self.path)
        self.log = ChangeLog.open(self.path)
        kept = [item.row for item in self.diary.noted if not self.is_gone(item)]
        assert in_order(rows_of(self.log.follow())) == kept


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_every_reader_gets_each_row_once_in_any_order_of_work(quick: Path, seed: int) -> None:
    story = Story(quick, seed)
    story.play(STEPS)
    story.end()
