"""Show, verify, seal and trim a log by hand, and list its readers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from tailrace.changelog.format.seal import Seal
from tailrace.changelog.format.trimmed import TrimmedTable, TrimRecord, write_trimmed
from tailrace.changelog.maintain.maintenance import MaintenancePolicy, maintain_once
from tailrace.changelog.maintain.retention import RetentionPolicy, trim
from tailrace.changelog.maintain.sealer import Sealer
from tailrace.changelog.read.consumers import TableProgress, consumer_path, write_table_progress
from tailrace.changelog.read.index import LogIndex
from tailrace.changelog.read.reader import ChangeLog
from tailrace.control import log_actions
from tailrace.errors import ConfigError, ExitCode, LogBusy, LogUnusable
from tailrace.model.schema import TableId
from tailrace.pipeline.report import LoggedTable, LogReaderStatus, LogSealResult
from tests.support.changes import SHOP
from tests.support.logs import OTHER, STEP, Diary, inserts, quick_folder

EVERYTHING = RetentionPolicy(age_seconds=0.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def diary(tmp_path: Path) -> Iterator[Diary]:
    """A log with a commit of 2 rows, one of 3 rows in two tables, and one without rows."""
    with quick_folder(tmp_path) as folder:
        diary = Diary(folder / "log")
        diary.commit(inserts(1, 2))
        diary.commit(inserts(3), inserts(4, 5, schema=OTHER), transactions=2)
        diary.commit()
        yield diary
        diary.close()


def hint(*numbers: int, commit: int, seq: int, name: str = "things") -> TableProgress:
    return TableProgress(table=TableId("public", name), numbers=numbers, commit=commit, seq=seq)


def seal(diary: Diary, grace_seconds: float = 300.0) -> LogSealResult:
    return log_actions.seal(diary.path, grace_seconds=grace_seconds, progress=lambda done, of: None)


def reader(diary: Diary, name: str) -> LogReaderStatus:
    return next(found for found in log_actions.readers(diary.path) if found.name == name)


# --- show --------------------------------------------------------------------------------------------------


def test_a_new_log_is_shown_as_empty(folder: Path) -> None:
    Diary(folder).close()
    shown = log_actions.read_overview(folder)
    assert (shown.first_commit, shown.last_commit, shown.rows, shown.tables) == (None, None, 0, ())
    assert shown.source == "memory one/shop"


def test_a_folder_without_a_log_is_an_error(folder: Path) -> None:
    for look in (log_actions.read_overview, log_actions.readers):
        with pytest.raises(LogUnusable, match="no log here"):
            look(folder)


def test_sealing_does_not_change_what_a_log_holds(diary: Diary) -> None:
    before = log_actions.read_overview(diary.path)
    assert (before.first_commit, before.last_commit, before.sealed_commit) == (1, 3, None)
    assert (before.rows, before.transactions, before.rows_trimmed) == (5, 3, 0)
    assert (before.start_position, before.end_position) == ("0/0", f"0/{3 * STEP:X}")
    schema, things, other = before.tables
    assert (schema.name, schema.rows, schema.schema) == ("schema", 2, "")
    assert (things.name, things.number, things.versions, things.rows) == ("public.things", 1, 1, 3)
    assert (other.name, other.first_commit, other.last_commit, other.rows) == ("public.other", 2, 2, 2)
    seal(diary)
    after = log_actions.read_overview(diary.path)
    assert after.sealed_commit == 3
    for name in ("rows", "transactions", "start_position", "end_position", "written_from", "written_to"):
        assert getattr(after, name) == getattr(before, name), name
    assert [(table.files, table.rows) for table in after.tables] == [(1, 2), (1, 3), (1, 2)]
    assert after.cold_bytes > 0
    assert after.bytes >= after.hot_bytes + after.cold_bytes


def test_trimmed_rows_are_counted_and_the_log_begins_later(diary: Diary) -> None:
    seal(diary)
    write_table_progress(diary.path, [hint(2, commit=1, seq=2, name="other")])
    diary.commit(inserts(6))
    log_actions.trim(diary.path, EVERYTHING)
    shown = log_actions.read_overview(diary.path)
    assert (shown.first_commit, shown.last_commit) == (1, 4), "the other table still needs its rows of commit 2"
    assert (shown.rows, shown.rows_trimmed) == (3, 3)
    assert {table.name: table.rows_trimmed for table in shown.tables} == {
        "schema": 2,
        "public.things": 3,
        "public.other": 0,
    }
    write_table_progress(diary.path, [])
    log_actions.trim(diary.path, EVERYTHING)
    assert log_actions.read_overview(diary.path).first_commit == 4


def test_status_files_of_processes_are_not_counted_as_the_log(diary: Diary) -> None:
    before = log_actions.read_overview(diary.path).bytes
    (diary.path / "status" / "spark.log").write_bytes(bytes(1 << 20))
    assert log_actions.read_overview(diary.path).bytes == before


def test_a_fully_trimmed_log_still_shows_its_end(diary: Diary) -> None:
    seal(diary)
    log_actions.trim(diary.path, EVERYTHING)
    shown = log_actions.read_overview(diary.path)
    assert (shown.first_commit, shown.last_commit, shown.sealed_commit) == (None, 3, 3)
    assert shown.start_position == shown.end_position == f"0/{3 * STEP:X}"
    assert log_actions.verify(diary.path, lambda done, of: None).ok


def test_a_log_can_be_shown_while_it_is_written_sealed_and_trimmed(diary: Diary) -> None:
    done = Event()

    def write() -> None:
        while not done.is_set():
            diary.commit(inserts(1), inserts(2, schema=OTHER))
            time.sleep(0.001)

    def order() -> None:
        log = ChangeLog.open(diary.path)
        keeping = MaintenancePolicy(grace_seconds=0.0, retention=RetentionPolicy(age_seconds=0.2))
        while not done.is_set():
            maintain_once(log, keeping, seal=True)

    with ThreadPoolExecutor() as pool:
        working = [pool.submit(write), pool.submit(order)]
        try:
            until = time.monotonic() + 2.0
            while time.monotonic() < until:
                shown = log_actions.read_overview(diary.path)
                assert shown.rows + shown.rows_trimmed >= 5
                log_actions.readers(diary.path)
        finally:
            done.set()
    for work in working:
        work.result()


# --- verify ------------------------------------------------------------------------------------------------


def test_verify_lists_each_problem_with_its_file_and_remedy(diary: Diary) -> None:
    seal(diary)
    file = ChangeLog.open(diary.path).files("public.things")[0]
    file.write_bytes(b"PAR1")
    (diary.path / "trimmed.json").write_text("{}")
    found = log_actions.verify(diary.path, lambda done, of: None)
    assert not found.ok
    assert found.problems_total == len(found.problems) == 2
    assert {problem.path for problem in found.problems} == {str(file), str(diary.path / "trimmed.json")}
    assert all("Restore" in problem.hint for problem in found.problems)


# --- seal --------------------------------------------------------------------------------------------------


def test_sealing_reports_its_result_and_a_second_time_seals_nothing(diary: Diary) -> None:
    calls: list[tuple[int, int]] = []
    done = log_actions.seal(diary.path, grace_seconds=0.0, progress=lambda done, of: calls.append((done, of)))
    assert (done.commits, done.rows, done.seals, done.sealed_commit) == (3, 5, 1, 3)
    assert done.removed == 2, "the files of the sealed commits, but for the newest"
    assert calls[-1] == (3, 3)
    again = seal(diary)
    assert (again.commits, again.rows, again.sealed_commit) == (0, 0, 3)


def test_many_small_seals_are_merged(diary: Diary) -> None:
    joined = 0
    for key in range(10):
        diary.commit(inserts(key))
        joined += seal(diary).joined
    assert joined == 8


def test_sealing_while_another_process_seals_is_refused(diary: Diary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_actions, "WAIT_SECONDS", 0.2)
    with Sealer(diary.path):
        for act in (lambda: seal(diary), lambda: log_actions.trim(diary.path, EVERYTHING)):
            with pytest.raises(LogBusy, match="another process is sealing") as caught:
                act()
            assert caught.value.exit_code is ExitCode.BUSY
            assert "try again" in caught.value.hint
            assert "--take-over" not in caught.value.hint
            assert caught.value.fields["pid"]
        log_actions.read_overview(diary.path)
        log_actions.verify(diary.path, lambda done, of: None)


# --- trim --------------------------------------------------------------------------------------------------


def test_trimming_keeps_young_rows_unless_an_age_is_given(diary: Diary) -> None:
    seal(diary)
    assert log_actions.trim(diary.path, RetentionPolicy()).files == 0
    assert log_actions.trim(diary.path, RetentionPolicy(), older_than_seconds=3600).files == 0
    done = log_actions.trim(diary.path, RetentionPolicy(age_seconds=None), older_than_seconds=0)
    assert (done.commits, done.files) == (3, 3)
    assert done.bytes > 0
    assert done.first_commit is None


def test_trimming_reports_unsealed_commits(diary: Diary) -> None:
    assert log_actions.trim(diary.path, EVERYTHING).unsealed_commits == 3
    seal(diary)
    diary.commit(inserts(7))
    done = log_actions.trim(diary.path, EVERYTHING)
    assert (done.unsealed_commits, done.first_commit) == (1, 4)


def test_trimming_removes_nothing_that_a_reader_needs_whatever_the_limit(diary: Diary) -> None:
    seal(diary)
    write_table_progress(diary.path, [hint(1, commit=0, seq=0)])
    done = log_actions.trim(diary.path, RetentionPolicy(age_seconds=0.0, bytes=1, max_bytes=1))
    (table,) = done.readers
    assert (table.name, table.state, table.behind_rows) == ("public.things", "live", 3)
    assert table.held_bytes > 0
    assert [batch.schema.table.name for batch in ChangeLog.open(diary.path).follow()] == ["things"]


def test_rows_recorded_as_trimmed_and_not_yet_removed_are_counted_once(diary: Diary) -> None:
    seal(diary)
    whole = sum(file.rows for item in _seals(diary) for file in item.files if file.table)
    (sealed,) = _seals(diary)
    tables = {
        file.table: TrimmedTable(last_seq=file.last_seq, commit=file.last, rows=file.rows, bytes=file.size)
        for file in sealed.files
    }
    write_trimmed(
        diary.path,
        TrimRecord(commit=3, position=sealed.end, next_seq=sealed.next_seq, transactions=3, rows=whole, tables=tables),
    )
    diary.commit(inserts(6))
    index = LogIndex(ChangeLog.open(diary.path))
    index.grow()
    assert (index.rows, index.transactions) == (6, 4)
    seal(diary)
    log_actions.trim(diary.path, EVERYTHING)
    trimmed = ChangeLog.open(diary.path).trimmed()
    assert (trimmed.rows, trimmed.transactions, trimmed.commit) == (6, 4, 4)


def _seals(diary: Diary) -> tuple[Seal, ...]:
    log = ChangeLog.open(diary.path)
    log.seal_index.refresh()
    return log.seal_index.seals


# --- readers ---------------------------------------------------------------------------------------------


def test_a_table_and_a_consumer_show_their_progress(diary: Diary) -> None:
    write_table_progress(diary.path, [hint(1, commit=1, seq=2)])
    log = ChangeLog.open(diary.path)
    list(log.follow(table="public.other", consumer="nightly"))
    next(log.follow(consumer="slow"))
    seal(diary)
    diary.commit(inserts(8, 9))
    table, nightly, slow = log_actions.readers(diary.path)
    assert (table.kind, table.name, table.tables) == ("table", "public.things", ("public.things",))
    assert (table.commit, table.seq, table.position) == (1, 2, f"0/{STEP:X}")
    assert (table.behind_commits, table.expires_at) == (3, None)
    assert (nightly.kind, nightly.tables, nightly.behind_rows) == ("consumer", ("public.other",), 0)
    assert nightly.expires_at is not None
    assert nightly.expires_at > nightly.seen_at
    assert (slow.tables, slow.commit, slow.behind_rows) == (None, 0, 7)
    assert slow.held_bytes > table.held_bytes > nightly.held_bytes == 0


def test_an_expired_or_detached_reader_holds_nothing(diary: Diary) -> None:
    log = ChangeLog.open(diary.path)
    next(log.follow(table="public.things", consumer="gone", expires_seconds=0.0))
    write_table_progress(diary.path, [hint(2, commit=0, seq=0, name="other")])
    seal(diary)
    time.sleep(0.01)
    assert (reader(diary, "gone").state, reader(diary, "gone").held_bytes) == ("expired", 0)
    with Sealer(diary.path) as sealer:
        trim(sealer, RetentionPolicy(age_seconds=None, max_bytes=100))
    table = reader(diary, "public.other")
    assert (table.state, table.held_bytes) == ("detached", 0)


def test_a_consumer_can_be_forgotten_and_a_table_cannot(diary: Diary) -> None:
    list(ChangeLog.open(diary.path).follow(consumer="nightly"))
    write_table_progress(diary.path, [hint(1, commit=1, seq=2)])
    with pytest.raises(ConfigError, match="no such consumer") as caught:
        log_actions.forget_consumer(diary.path, "nigthly")
    assert "There are: nightly." in caught.value.hint
    with pytest.raises(ConfigError, match="lake table") as caught:
        log_actions.forget_consumer(diary.path, "public.things")
    assert "Exclude the table" in caught.value.hint
    with pytest.raises(ConfigError, match="name is not valid"):
        log_actions.forget_consumer(diary.path, "../meta")
    log_actions.forget_consumer(diary.path, "nightly")
    assert not consumer_path(diary.path, "nightly").exists()
    assert [found.name for found in log_actions.readers(diary.path)] == ["public.things"]


def test_the_name_of_a_table_has_its_schema_and_that_of_a_system_stream_has_none() -> None:
    table = LoggedTable(number=3, schema="a.b", table="c", versions=1)
    assert table.name == "a.b.c"
    assert LoggedTable(number=0, schema="", table="schema", versions=1).name == "schema"
    assert SHOP.table.name == "things"
