"""The index over sealed, merged and trimmed commits equals that over unsealed ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tailrace.changelog.format.commit_file import commit_path
from tailrace.changelog.format.schemas import LogSchemaVersion
from tailrace.changelog.maintain.retention import RetentionPolicy, trim
from tailrace.changelog.maintain.seal_contents import SealLimits
from tailrace.changelog.maintain.sealer import Sealer
from tailrace.changelog.read.consumers import TableProgress, write_table_progress
from tailrace.changelog.read.index import LogIndex, Slice
from tailrace.changelog.read.reader import ChangeLog
from tailrace.errors import LogCorrupt, LogUnreachable
from tailrace.model.position import ZERO, Lsn
from tailrace.storage.files import LogPath
from tests.support.changes import SHOP, insert
from tests.support.logs import OFTEN, OTHER, STEP, Diary, Row, in_order, inserts, rows_of, seal
from tests.support.windows import named

PLACES = OFTEN

RENAMED = named("public", "renamed", SHOP.relation)
PAIRS = SealLimits(merge_count=2, commits=3)


def index_of(path: LogPath) -> LogIndex:
    index = LogIndex(ChangeLog.open(path))
    index.grow()
    return index


def write(diary: Diary) -> None:
    """Write twelve commits: some empty, two tables, two versions, one large."""
    diary.commit()
    diary.commit(inserts(1, 2))
    diary.commit(inserts(3), inserts(4, schema=OTHER))
    diary.commit()
    diary.commit()
    diary.commit(inserts(5, schema=OTHER))
    diary.piece(inserts(6))
    diary.piece(inserts(7, 8))
    diary.finish()
    diary.commit(inserts(9), (RENAMED, [insert(10)]))
    diary.commit()
    diary.commit(inserts(11, schema=RENAMED), transactions=3)
    diary.commit(inserts(12, schema=OTHER))
    diary.commit()


def rows_at(index: LogIndex, log: ChangeLog, slices: list[Slice]) -> list[Row]:
    """Return the rows of a table's slices, read as the applying process reads them."""
    found: list[Row] = []
    for item in slices:
        after = found[-1].seq if found else 0
        found += rows_of(log.read(item.first, item.last, tables=[item.table], after_seq=after, to_seq=item.last_seq))
    return found


def answers_of(index: LogIndex) -> tuple[object, ...]:
    """Return the answers that must not depend on sealing."""
    return (
        index.last_commit,
        index.position,
        index.rows,
        index.transactions,
        [index.rows_captured(table) for table in range(4)],
        index.next_seq(index.last_commit),
    )


@pytest.mark.parametrize("how", ["hot", "grace", "cold", "joined", "half"])
def test_the_index_is_the_same_for_sealed_and_unsealed_rows(diary: Diary, how: str) -> None:
    write(diary)
    hot = answers_of(index_of(diary.path))
    if how == "half":
        seal(diary.path, limits=PAIRS)
        diary.commit(inserts(20), inserts(21, schema=OTHER))
        diary.commit()
    elif how != "hot":
        limits = PAIRS if how == "joined" else SealLimits(commits=3, merge_count=99)
        seal(diary.path, limits=limits, grace_seconds=300 if how == "grace" else 0)
    log, index = ChangeLog.open(diary.path), index_of(diary.path)
    if how != "half":
        assert answers_of(index) == hot
    assert (index.last_commit, index.position) == (diary.writer.commit, diary.writer.position)
    assert index.rows == len(diary.noted)
    for number, schema in ((1, SHOP), (2, OTHER)):
        mine = diary.rows(schema=schema)
        assert index.rows_captured(number) == len(mine)
        for row in [*mine, None]:
            seq = row.seq if row else 0
            wanted = [found for found in mine if found.seq > seq]
            slices = index.pending(number, seq, index.last_commit)
            assert [found.seq for found in rows_at(index, log, slices) if found.seq > seq] == [
                found.seq for found in wanted
            ]
        for to in range(index.last_commit + 1):
            slices = index.pending(number, 0, to)
            assert all(item.first <= to for item in slices)
            covered = max((item.last_seq for item in slices), default=0)
            assert covered >= max(
                (item.row.seq for item in diary.noted if item.commit <= to and item.row in mine), default=0
            )


@pytest.mark.parametrize("limits", [None, PAIRS, SealLimits(commits=99)])
def test_the_newest_commit_time_is_known_for_sealed_and_unsealed_commits(
    diary: Diary, limits: SealLimits | None
) -> None:
    diary.commit()
    for number, seconds in enumerate((100, 200, 150, 180, 300), start=1):
        diary.commit(inserts(number), at=seconds * 1_000_000)
    if limits is not None:
        seal(diary.path, limits=limits)
    index = index_of(diary.path)
    diary.commit(inserts(6), at=250_000_000)
    diary.commit()
    index.grow()
    known = [index.committed_until(commit) for commit in range(1, 9)]
    assert known == [None, *(seconds * 1_000_000 for seconds in (100, 200, 200, 200, 300, 300, 300))]


@pytest.mark.parametrize("sealed", [False, True])
def test_positions_and_commits_map_to_each_other(diary: Diary, sealed: bool) -> None:
    write(diary)
    if sealed:
        seal(diary.path, limits=PAIRS)
    index = index_of(diary.path)
    assert index.end_of(0) == ZERO
    assert index.next_seq(0) == 1
    for commit in range(1, index.last_commit + 1):
        rows = [item for item in diary.noted if item.commit <= commit]
        assert index.next_seq(commit) == len(rows) + 1
        if any(item.commit == commit for item in diary.noted):
            assert (index.start_of(commit), index.end_of(commit)) == (Lsn((commit - 1) * STEP), Lsn(commit * STEP))
    for position in range(0, (index.last_commit + 1) * STEP, 25):
        found = index.commit_at(Lsn(position))
        assert found <= position // STEP
        # Once commits without rows are sealed only the last is listed, so the commit may be an earlier one.
        assert diary.rows(found) == diary.rows(min(position // STEP, index.last_commit))


def test_a_grown_index_equals_a_new_one_after_any_change_of_the_log(diary: Diary) -> None:
    grown = index_of(diary.path)
    for round_ in range(6):
        diary.commit(inserts(round_), inserts(round_, schema=OTHER))
        if round_ % 2:
            grown.grow()
        diary.commit(*([inserts(100 + round_)] if round_ % 3 else []))
        if round_ > 3:
            grown.grow()
        if round_ % 3 == 2:
            seal(diary.path, limits=SealLimits(merge_count=2))
        if round_ == 4:
            write_table_progress(diary.path, [TableProgress(table=OTHER.table, numbers=(2,), commit=2, seq=2)])
            with Sealer(diary.path) as sealer:
                trim(sealer, RetentionPolicy(age_seconds=0.0), now=4e9)
        grown.grow()
        fresh = index_of(diary.path)
        assert answers_of(grown) == answers_of(fresh)
        for table in (1, 2):
            assert grown.pending(table, 0, 99) == fresh.pending(table, 0, 99)
            assert grown.trimmed_after(table, 0) == fresh.trimmed_after(table, 0)
        assert grown.first_commit == fresh.first_commit
        assert grown.bytes == fresh.bytes


def test_an_index_that_grows_to_a_number_loads_all_sealed_commits(diary: Diary) -> None:
    write(diary)
    seal(diary.path)
    diary.commit(inserts(30))
    diary.commit(inserts(31))
    index = LogIndex(ChangeLog.open(diary.path))
    index.grow(13)
    assert index.last_commit == 13
    early = LogIndex(ChangeLog.open(diary.path))
    early.grow(2)
    assert early.last_commit == 12


def test_trimmed_rows_are_not_pending_but_count_as_captured(diary: Diary) -> None:
    write(diary)
    seal(diary.path, limits=SealLimits(commits=3))
    write_table_progress(diary.path, [TableProgress(table=OTHER.table, numbers=(2,), commit=3, seq=4)])
    with Sealer(diary.path) as sealer:
        trim(sealer, RetentionPolicy(age_seconds=0.0), now=4e9)
    diary.commit(inserts(40))
    log, index = ChangeLog.open(diary.path), index_of(diary.path)
    assert index.first_commit == 4
    gone = index.trimmed_after(1, 0)
    assert gone is not None
    assert index.trimmed_after(1, gone.last_seq) is None
    assert [item.first for item in index.pending(1, 0, 99)] == [13]
    assert in_order(rows_at(index, log, index.pending(2, 4, 99))) == [
        row for row in diary.rows(schema=OTHER) if row.seq > 4
    ]
    assert index.rows_captured(1) == len(diary.rows(schema=SHOP))
    assert index.end_of(3) == Lsn(3 * STEP)
    assert index.commit_at(Lsn(3 * STEP)) == 3


def test_an_index_grows_over_commits_that_are_sealed_meanwhile(diary: Diary) -> None:
    write(diary)
    log = ChangeLog.open(diary.path)
    index = LogIndex(log)
    index.grow(2)
    log.newest()
    seal(diary.path)
    diary.commit(inserts(50))
    index.grow()
    assert answers_of(index) == answers_of(index_of(diary.path))


def test_a_commit_is_indexed_once_its_schemas_can_be_read(diary: Diary, monkeypatch: pytest.MonkeyPatch) -> None:
    diary.commit(inserts(1), inserts(2, schema=OTHER))
    log = ChangeLog.open(diary.path)
    index, get = LogIndex(log), log.schemas.get
    unread = [(2, 1)]

    def fail_once(table: int, version: int) -> LogSchemaVersion:
        if (table, version) in unread:
            unread.clear()
            raise LogUnreachable("the store does not answer")
        return get(table, version)

    monkeypatch.setattr(log.schemas, "get", fail_once)
    with pytest.raises(LogUnreachable):
        index.grow()
    index.grow()
    assert answers_of(index) == answers_of(index_of(diary.path))
    assert [len(index.pending(table, 0, 99)) for table in (1, 2)] == [1, 1]


class Interrupted(LogIndex):
    """An index that another thread reads whenever an attribute is replaced."""

    asks: Callable[[], None] = staticmethod(lambda: None)

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        type(self).asks()


def test_index_answers_do_not_change_while_commits_move_into_seals(
    diary: Diary, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(1, 10):
        diary.commit(inserts(number))
    index = Interrupted(ChangeLog.open(diary.path))
    index.grow()

    def answers() -> list[tuple[object, ...]]:
        commits = range(1, 10)
        return [
            (index.end_of(commit), index.start_of(commit), index.next_seq(commit), index.commit_at(Lsn(commit * STEP)))
            for commit in commits
        ] + [(index.last_commit, index.position, index.first_commit, index.trimmed_after(1, 0))]

    def asks() -> None:
        heard.append(answers() == before)
        heard.append(all(after < index.furthest_commit(after, 2) <= 9 for after in range(9)))

    before, heard = answers(), list[bool]()
    for last in (4, 9):
        with Sealer(diary.path, limits=SealLimits(commits=4)) as sealer:
            sealer._seal_next(sealer.unsealed_range()[0], last)
        monkeypatch.setattr(Interrupted, "asks", staticmethod(asks))
        index.grow()
        monkeypatch.undo()
    assert len(heard) > 10
    assert all(heard)


def test_a_really_missing_commit_is_reported(diary: Diary) -> None:
    write(diary)
    commit_path(diary.path, 5).unlink()
    with pytest.raises(LogCorrupt):
        index_of(diary.path)


def test_an_index_answers_for_seals_merged_or_trimmed_since_it_grew(diary: Diary) -> None:
    write(diary)
    with Sealer(diary.path, limits=PAIRS) as sealer:
        sealer.seal()
        index = index_of(diary.path)
        ends = [index.end_of(commit) for commit in range(1, index.last_commit + 1)]
        fresh = LogIndex(ChangeLog.open(diary.path))
        fresh.grow()
        sealer.merge_seals()
        sealer.clean(0.0)
        assert [fresh.commit_at(end) for end in ends[1:]] == [index.commit_at(end) for end in ends[1:]]
        late = LogIndex(ChangeLog.open(diary.path))
        late.grow()
        trim(sealer, RetentionPolicy(age_seconds=0.0), now=4e9)
    for commit, end in enumerate(ends, start=1):
        assert late.end_of(commit) >= end
        assert late.commit_at(end) <= commit


def test_a_table_with_all_rows_trimmed_is_still_known(diary: Diary) -> None:
    write(diary)
    with Sealer(diary.path, limits=PAIRS) as sealer:
        sealer.seal()
        trim(sealer, RetentionPolicy(age_seconds=0.0), now=4e9)
    log = ChangeLog.open(diary.path)
    index = LogIndex(log)
    index.grow()
    assert OTHER.table in {version.schema.table for version in log.schemas.latest()}
    assert sum(index.rows_captured(version.table) for version in log.schemas.latest()) == index.rows
