"""Disk trouble: one clear error with a remedy, and nothing lost.

The disk is full, read-only, failing, or not accessible.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tailrace.changelog.maintain.maintenance import LogMaintenance, MaintenancePolicy, maintain_once
from tailrace.changelog.maintain.retention import RetentionPolicy, trim
from tailrace.changelog.maintain.sealer import Sealer
from tailrace.changelog.read.reader import ChangeLog
from tailrace.changelog.write.writer import LogWriter
from tailrace.errors import LogFull, LogUnusable
from tests.support.changes import SHOP, insert
from tests.support.disks import fill, mounted
from tests.support.logs import Diary, Given, assert_nothing_left_over, inserts, read_all, stored_files
from tests.support.pipelines import eventually
from tests.support.windows import SOURCE, named, rows_window

NOBODY = 65534
as_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="SKIPPED LOUDLY: needs root, to mount a small disk or to become a user without rights"
)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own that holds 1 MiB."""
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=1m", "tmpfs") as disk:
        yield disk


@contextmanager
def read_only(disk: Path) -> Iterator[None]:
    """Remount the disk read-only, as after an error; open files stay open."""
    with mounted(disk, "--bind", str(disk)):
        subprocess.run(["mount", "-o", "remount,bind,ro", str(disk)], check=True)
        yield


def bulky(key: int, size: int) -> Given:
    """A row that compression does not make smaller."""
    return SHOP, [insert(key, big=random.randbytes(size // 2).hex())]


@pytest.fixture
def diary(small_disk: Path) -> Iterator[Diary]:
    """A log on the small disk that has something to seal and something to trim."""
    opened = Diary(small_disk / "log")
    opened.commit()
    opened.commit(bulky(1, 20_000))
    opened.commit(inserts(2, 3))
    yield opened
    opened.close()


def whole(diary: Diary) -> bool:
    return read_all(diary.path) == diary.rows()


# --- what is under way when the disk fails -----------------------------------------------------------------


def appending(diary: Diary) -> None:
    diary.commit(bulky(10, 60_000))


def recording_a_schema(diary: Diary) -> None:
    diary.commit(inserts(11, schema=named("public", "new", 77)))


def spilling(diary: Diary) -> None:
    diary.piece(bulky(12, 60_000), continues=False)
    diary.piece(bulky(13, 60_000))
    diary.finish(inserts(14))


def sealing(diary: Diary) -> None:
    with Sealer(diary.path) as sealer:
        sealer.seal()
        sealer.clean(0.0)


def trimming(diary: Diary) -> None:
    with Sealer(diary.path) as sealer:
        trim(sealer, RetentionPolicy(age_seconds=0.0))


WORK: dict[str, Callable[[Diary], None]] = {
    "appending": appending,
    "recording a schema": recording_a_schema,
    "spilling a large transaction": spilling,
    "sealing": sealing,
}


LEFT_KIB: dict[str, tuple[int, ...]] = {
    "appending": (0, 4, 48),
    "recording a schema": (0, 4),
    "spilling a large transaction": (0, 4, 80),
    "sealing": (0, 4, 24),
}
"""KiB that are left at the start; never enough."""


@as_root
@pytest.mark.parametrize(("name", "left"), [(name, left) for name, some in LEFT_KIB.items() for left in some])
def test_a_full_disk_is_reported_and_work_continues_once_there_is_room(
    small_disk: Path, diary: Diary, name: str, left: int
) -> None:
    work = WORK[name]
    filler = fill(small_disk, left << 10)
    before = stored_files(diary.path, "**/*")
    for _ in range(3):
        with pytest.raises(LogFull, match="No space left") as caught:
            work(diary)
        assert "Free space" in caught.value.hint
        assert whole(diary)
        taken = stored_files(diary.path, "**/*") - before
        # A recorded schema stays. The others name the files that were there.
        assert taken <= {"sealer.json", "sealer.lock", "schemas/2/1.json"}, "it left its files on the disk"
    filler.unlink()
    work(diary)
    assert whole(diary)
    diary.commit(inserts(99))
    sealing(diary)
    assert whole(diary)
    assert_nothing_left_over(diary.path)


@as_root
@pytest.mark.parametrize("work", WORK.values(), ids=WORK.keys())
def test_a_read_only_disk_is_reported_and_work_continues_once_it_is_writable(
    small_disk: Path, diary: Diary, work: Callable[[Diary], None]
) -> None:
    with read_only(small_disk):
        for _ in range(2):
            with pytest.raises(LogUnusable, match="Read-only") as caught:
                work(diary)
            assert not isinstance(caught.value, LogFull)
            assert "Mount the file system writable" in caught.value.hint
            assert whole(diary)
    work(diary)
    assert whole(diary)
    diary.commit(inserts(99))
    sealing(diary)
    assert whole(diary)
    assert_nothing_left_over(diary.path)


@as_root
def test_removable_files_are_removed_from_a_full_disk(small_disk: Path, diary: Diary) -> None:
    sealing(diary)
    before = ChangeLog.open(diary.path).files("public.things")
    fill(small_disk)
    with pytest.raises(LogFull, match="No space left"):
        trimming(diary)
    assert whole(diary)
    (small_disk / "filler").unlink()
    fill(small_disk, 4 << 10)  # enough for the record, not for the links
    trimming(diary)
    assert [path for path in before if path.exists()] == []
    diary.commit(inserts(50))
    assert read_all(diary.path, after=3) == diary.rows(after=3)
    sealing(diary)
    assert_nothing_left_over(diary.path)


@as_root
def test_files_of_a_killed_writer_do_not_keep_the_disk_full(small_disk: Path, diary: Diary) -> None:
    diary.piece(bulky(20, 300_000), continues=False)
    diary.reopen()
    assert stored_files(diary.path, "big/*/*"), "no commit has shown yet that it is left over"
    filler = fill(small_disk, leave=100_000)
    with pytest.raises(LogFull):
        diary.commit(bulky(20, 200_000))
    diary.commit(bulky(20, 200_000))
    assert not stored_files(diary.path, "big/*/*")
    assert whole(diary)
    filler.unlink()


@as_root
def test_a_log_opens_on_a_full_disk_and_continues_once_there_is_room(small_disk: Path, diary: Diary) -> None:
    diary.close()
    filler = fill(small_disk)
    diary.reopen()
    with pytest.raises(LogFull, match="No space left"):
        diary.commit(inserts(70))
    assert whole(diary)
    filler.unlink()
    diary.commit(inserts(70))
    assert whole(diary)


@as_root
def test_a_new_log_on_a_full_disk_is_created_once_there_is_room(small_disk: Path) -> None:
    filler = fill(small_disk)
    with pytest.raises(LogFull, match="No space left") as caught:
        LogWriter(small_disk / "new", SOURCE)
    assert "Free space" in caught.value.hint
    filler.unlink()
    LogWriter(small_disk / "new", SOURCE).close()


@as_root
def test_a_read_only_disk_is_reported_with_a_hint(small_disk: Path) -> None:
    LogWriter(small_disk / "log", SOURCE).close()
    with read_only(small_disk):
        for path in (small_disk / "log", small_disk / "new"):
            with pytest.raises(LogUnusable, match="Read-only") as caught:
                LogWriter(path, SOURCE)
            assert "`log:`" in caught.value.hint
        assert ChangeLog.open(small_disk / "log").newest() == 0
    LogWriter(small_disk / "log", SOURCE).close()


@pytest.mark.parametrize("where", ["file", "file/below"])
def test_a_file_instead_of_the_log_folder_is_reported(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(LogUnusable) as caught:
        LogWriter(tmp_path / where, SOURCE)
    assert "`log:`" in caught.value.hint
    assert (tmp_path / "file").read_text() == "mine"


# --- maintenance -------------------------------------------------------------------------------------------


@as_root
def test_maintenance_on_a_full_disk_makes_the_room_that_the_writer_needs(small_disk: Path) -> None:
    """Only the log is on the disk: it must not fill it and stay full."""
    diary = Diary(small_disk / "log")
    diary.commit()
    policy = MaintenancePolicy(grace_seconds=1e6, retention=RetentionPolicy(age_seconds=None, bytes=850_000))
    log, full = ChangeLog.open(diary.path), 0

    def put_in_order() -> int:
        """Run one round; count how often sealing or merging found no room."""
        for tries in range(3):
            with suppress(LogFull):
                maintain_once(log, policy, seal=True)
                return tries
        return 3

    for key in range(1, 40):
        try:
            diary.commit(bulky(key, 60_000))
        except LogFull:
            full += put_in_order()
            diary.commit(bulky(key, 60_000))
        if key % 4 == 0:
            full += put_in_order()
    assert full, "the disk was never full"
    kept = log.trimmed().tables[1].commit
    assert read_all(diary.path, after=kept) == diary.rows(after=kept)
    diary.close()


@as_root
def test_maintenance_without_room_blocks_no_writer_and_seals_once_there_is_room(
    small_disk: Path, diary: Diary, caplog: pytest.LogCaptureFixture
) -> None:
    policy = MaintenancePolicy(
        seal_commits=1,
        grace_seconds=0.0,
        retention=RetentionPolicy(age_seconds=None),
        check_seconds=0.05,
        retry_seconds=0.1,
    )
    filler = fill(small_disk, 20 << 10)  # enough for a commit, not for a seal
    maintenance = LogMaintenance(diary.path, policy)
    maintenance.start()
    try:
        assert eventually(lambda: "log-full" in [vars(said).get("code") for said in caplog.records])
        # Each try takes the room for a moment and frees it again.
        assert eventually(lambda: committed(diary, 60))
        assert whole(diary)
        filler.unlink()
        diary.commit(inserts(61))
        assert eventually(lambda: ChangeLog.open(diary.path).seal_index.refresh() and sealed_to(diary) >= 4)
        assert whole(diary)
    finally:
        maintenance.stop()
    assert [said for said in caplog.records if said.exc_info] == [], "the error was expected"
    assert_nothing_left_over(diary.path)


def committed(diary: Diary, key: int) -> bool:
    """Return true if there was room for the commit."""
    with suppress(LogFull):
        diary.commit(inserts(key))
        return True
    return False


def sealed_to(diary: Diary) -> int:
    log = ChangeLog.open(diary.path)
    log.seal_index.refresh()
    return log.seal_index.last_commit


# --- a disk that really fails ------------------------------------------------------------------------------


def go_on(diary: Diary) -> None:
    for key in range(100):
        diary.commit(bulky(key, 200_000))


@as_root
def test_a_failing_disk_loses_nothing_that_was_reported_durable(tmp_path: Path) -> None:
    """The device holds less than it claims: a write beyond that fails in fsync."""
    with mounted(tmp_path / "device", "-t", "tmpfs", "-o", "size=6m", "tmpfs") as device:
        image = device / "image"
        with image.open("wb") as file:
            file.truncate(32 << 20)
        made = subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], capture_output=True, text=True, check=False)
        if made.returncode:
            pytest.skip(f"SKIPPED LOUDLY: a failing device was not tried: {made.stderr}")
        with mounted(tmp_path / "disk", "-o", "loop", str(image)) as disk:
            diary = Diary(disk / "log")
            filler = fill(device)
            with pytest.raises(LogUnusable) as caught:
                go_on(diary)
            assert "Input/output error" in str(caught.value)
            assert "kernel's log" in caught.value.hint
            promised = diary.writer.commit
            with pytest.raises(LogUnusable):
                diary.commit(bulky(100, 200_000))
            noted = diary.rows()
            diary.close()
            filler.unlink()
            subprocess.run(["mount", "-o", "remount,size=64m", str(device)], check=True)
        with mounted(tmp_path / "disk", "-o", "loop", str(image)) as disk:
            (disk / "log" / "owner.json").unlink(
                missing_ok=True
            )  # a torn record makes the next process wait, which takes long
            again = Diary(disk / "log")
            assert again.writer.commit in (promised, promised + 1)
            assert read_all(disk / "log")[: len(noted)] == noted
            again.commit(inserts(1000))
            assert read_all(disk / "log")[-1].values["id"] == 1000
            again.close()


# --- without rights ----------------------------------------------------------------------------------------

CLOSED: dict[str, tuple[str, int, str]] = {
    "a folder above the log": ("", 0o755, "LogWriter(path / 'new', SOURCE)"),
    "the log, to write": ("log", 0o755, "LogWriter(path / 'log', SOURCE)"),
    "the log, to enter and write": ("log", 0o700, "LogWriter(path / 'log', SOURCE)"),
    "the log, to enter": ("log", 0o700, "ChangeLog.open(path / 'log')"),
    "its description": ("log/meta.json", 0o600, "ChangeLog.open(path / 'log')"),
    "its commits": ("log/hot", 0o700, "list(ChangeLog.open(path / 'log').follow(0))"),
    "the list of its commits": ("log/hot", 0o711, "ChangeLog.open(path / 'log').newest()"),
    "one commit": (f"log/hot/{1:020d}.arrow", 0o600, "list(ChangeLog.open(path / 'log').follow(0))"),
}
"""Paths closed to others, their modes, and what the others try."""

AS_NOBODY = f"""
import os, sys
from pathlib import Path
from tailrace.changelog.read.reader import ChangeLog
from tailrace.changelog.write.writer import LogWriter
from tailrace.errors import TailraceError
from tests.support.windows import SOURCE
os.setgid({NOBODY}); os.setuid({NOBODY})
for name, act in zip(sys.argv[2::2], sys.argv[3::2]):
    path = Path(sys.argv[1]) / name
    try:
        print(name, repr(eval(act)), sep="\\t")
    except TailraceError as error:
        print(name, error, sep="\\t")
    except OSError as error:
        print(name, repr(error), sep="\\t")
"""


@pytest.fixture(scope="module")
def errors() -> Iterator[dict[str, str]]:
    """Return the errors of a user without rights, by case.

    One process runs all cases, because a start takes a second.
    """
    top = Path(tempfile.mkdtemp(prefix="tailrace-test-"))  # other users may not enter pytest's own folders
    top.chmod(0o755)
    arguments = []
    for n, (closed, mode, act) in enumerate(CLOSED.values()):
        writer = LogWriter(top / str(n) / "log", SOURCE)
        writer.append(rows_window(0, 100, 1))
        writer.close()
        (top / str(n) / closed).chmod(mode)
        arguments += [str(n), act]
    done = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, str(top), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr
    lines = dict(line.split("\t", 1) for line in done.stdout.splitlines())
    yield {name: lines[str(n)] for n, name in enumerate(CLOSED)}
    shutil.rmtree(top)


@as_root
@pytest.mark.parametrize("case", CLOSED)
def test_a_log_without_permission_is_reported_and_never_an_empty_log(errors: dict[str, str], case: str) -> None:
    assert "Permission denied" in errors[case]
    assert "[log-unusable] | hint: " in errors[case]


LOST: dict[str, tuple[str, str]] = {
    "commits": ("hot", "appending"),
    "schemas": ("schemas", "recording a schema"),
    "pieces": ("big", "spilling a large transaction"),
    "seals": ("cold", "sealing"),
    "sealed files": ("cold/files", "sealing"),
    "the log": ("", "sealing"),
}
"""Folders that their owner may no longer write to, and the work then."""

AS_OWNER = f"""
import os, sys
from pathlib import Path
from tests.support.logs import Diary, inserts
from tests.unit.changelog.test_disk import LOST, WORK, whole
from tailrace.errors import LogUnusable
os.setgid({NOBODY}); os.setuid({NOBODY})
for number, (folder, name) in enumerate(LOST.values()):
    diary = Diary(Path(sys.argv[1]) / str(number))
    diary.commit(inserts(1))
    (diary.path / "cold" / "files").mkdir(exist_ok=True)
    (diary.path / folder).chmod(0o555)
    messages = []
    for _ in range(2):
        try:
            WORK[name](diary)
        except LogUnusable as error:
            messages.append(str(error))
    before = whole(diary)
    (diary.path / folder).chmod(0o755)
    WORK[name](diary)
    print(before and whole(diary), *messages, sep="\\t")
    diary.close()
"""


@as_root
def test_lost_write_permission_is_reported_and_work_continues_once_it_is_back() -> None:
    top = Path(tempfile.mkdtemp(prefix="tailrace-test-"))
    os.chown(top, NOBODY, NOBODY)
    done = subprocess.run(
        [sys.executable, "-c", AS_OWNER, str(top)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        cwd=Path(__file__).parents[3],
    )
    shutil.rmtree(top)
    assert done.returncode == 0, done.stderr
    errors = dict(zip(LOST, (line.split("\t") for line in done.stdout.splitlines()), strict=True))
    for case, (right, *said) in errors.items():
        assert right == "True", case
        assert len(said) == 2, case
        for text in said:
            assert "Permission denied" in text, case
            assert "[log-unusable] | hint: Give this user the right to write there" in text, case
