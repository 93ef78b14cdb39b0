"""Every damaged or missing file is reported; work of other processes is not."""

from __future__ import annotations

import json
import os
import shutil
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tailrace.changelog.format import commit_file
from tailrace.changelog.format import seal as cold
from tailrace.changelog.format.commit_file import commit_path
from tailrace.changelog.maintain import verify, verify_files
from tailrace.changelog.maintain.maintenance import MaintenancePolicy, maintain_once
from tailrace.changelog.maintain.retention import RetentionPolicy, trim
from tailrace.changelog.maintain.seal_contents import SealLimits
from tailrace.changelog.maintain.sealer import Sealer
from tailrace.changelog.maintain.verify_files import SeqDigest
from tailrace.changelog.read.reader import ChangeLog
from tailrace.errors import LogUnusable
from tailrace.model import change
from tailrace.model.schema import Column
from tailrace.storage import files, records
from tailrace.storage.files import LogPath, relative_name
from tests.support.changes import SHOP, delete, insert, move, update
from tests.support.logs import OTHER, STEP, THIRD, Diary, Given, inserts, quick_folder, seal
from tests.support.windows import batch, finishing_window, open_window

NEXT_SHOP = replace(SHOP, columns=(*SHOP.columns, Column(name="extra", source_type="text", type=pa.string())))
FIXTURE = Path(__file__).parents[3] / "fixtures" / "log-format-1" / "log"


def large_transaction(diary: Diary, *parts: list[Given]) -> None:
    """Write a transaction in these parts; all but the last are written as they arrive."""
    rows = 0
    for number, part in enumerate(parts):
        batches, first = [], 0
        for schema, given in part:
            made = batch(schema, *given, first=first)
            index = pa.array(range(rows, rows + len(made)), pa.int32())
            at = made.data.schema.get_field_index(change.TX_INDEX)
            batches.append(replace(made, data=made.data.set_column(at, made.data.schema.field(at), index)))
            first, rows = first + len(made), rows + len(made)
        begin = diary.writer.position.value
        if number < len(parts) - 1:
            diary.writer.append(open_window(begin, *batches, continues=number > 0))
        else:
            diary.writer.append(finishing_window(begin, begin + STEP, *batches))


def fill(path: Path) -> None:
    """Write a log with everything in it.

    It has two schemas, seals of two levels, replaced files, large transactions, a trimmed table, unsealed commits, and
    a sealed one that still has its own file.
    """
    diary = Diary(path)
    diary.commit()
    for number in range(8):
        diary.commit(inserts(*range(number * 10, number * 10 + 10)), inserts(number, schema=OTHER))
        diary.commit()
        if number == 3:
            large_transaction(diary, [inserts(1001, 1002), inserts(5, schema=THIRD)], [inserts(1003)], [inserts(1004)])
        seal(path, join=False)
    with Sealer(path) as sealer:
        everything = RetentionPolicy(age_seconds=0.0)
        sealer.log.seal_index.refresh()
        trimmed = trim(sealer, everything, now=time.time() + 10)
        assert trimmed.rows
    for number in range(8):
        rows = [*move(number, 500 + number, unchanged=("big",)), update(501, name="x"), delete(499)]
        diary.commit((NEXT_SHOP, [insert(400 + number, extra="e")]), (OTHER, rows))
        if number % 2:
            diary.commit()
        seal(path, join=False, grace_seconds=None)
    with Sealer(path, limits=SealLimits(merge_count=4)) as sealer:
        sealer.merge_seals()
    diary.commit(inserts(1, 2, schema=THIRD))
    seal(path, join=False, grace_seconds=None)
    diary.commit(inserts(3, schema=NEXT_SHOP))
    large_transaction(diary, [inserts(2001, 2002, schema=NEXT_SHOP)], [inserts(2003, schema=NEXT_SHOP)])
    diary.commit()
    diary.close()
    for reader, table in (("reader", None), ("other", "public.other")):
        list(ChangeLog.open(path).follow(ChangeLog.open(path).newest(), table=table, consumer=reader))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with quick_folder(tmp_path_factory.mktemp("verify")) as folder:
        fill(folder / "log")
        yield folder / "log"


@pytest.fixture
def log(original: Path) -> Iterator[Path]:
    """A copy that may be damaged."""
    with quick_folder(original.parent) as folder:
        shutil.copytree(original, folder / "copy", symlinks=True)
        yield folder / "copy"


def flaws(path: Path) -> list[verify.Flaw]:
    found = verify.verify(path)
    assert found.flaws_total == len(found.flaws)
    assert all(flaw.message and flaw.hint for flaw in found.flaws)
    return list(found.flaws)


def paths(path: Path) -> set[str]:
    return {relative_name(path, flaw.path) for flaw in flaws(path)}


def some(found: list[Path]) -> list[Path]:
    """Return the first, the last and a few between.

    To check a whole log once per file takes time.
    """
    return found if len(found) < 5 else [*found[:: len(found) // 3], found[-1]]


def stored(path: Path, pattern: str) -> list[Path]:
    found = sorted(item for item in path.glob(pattern) if not item.is_symlink())
    assert found, f"the log of this test has no {pattern}"
    return found


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def test_a_complete_log_has_no_flaw_and_every_file_is_checked(log: Path) -> None:
    found = verify.verify(log)
    assert found.flaws == ()
    change_log = ChangeLog.open(log)
    assert found.commits == change_log.newest() - change_log.trimmed().commit
    assert found.rows == sum(len(batch) for batch in change_log.follow())
    patterns = ("hot/*.arrow", "big/*/*.arrow", "cold/*.json", "cold/files/*/*.parquet", "schemas/*/*.json")
    assert found.files >= sum(len(stored(log, pattern)) for pattern in patterns)


def test_a_log_of_the_first_format_has_no_flaw() -> None:
    assert verify.verify(FIXTURE).flaws == ()


def test_a_new_log_has_no_flaw(folder: Path) -> None:
    Diary(folder).close()
    found = verify.verify(folder)
    assert (found.commits, found.rows, found.flaws) == (0, 0, ())


def test_a_folder_without_a_log_is_an_error_and_no_flaw(folder: Path) -> None:
    with pytest.raises(LogUnusable, match="no log here"):
        verify.verify(folder)


def test_progress_is_reported_in_bytes_and_ends_with_all_of_them(log: Path) -> None:
    calls: list[tuple[int, int]] = []
    verify.verify(log, lambda done, of: calls.append((done, of)))
    assert calls == sorted(calls)
    assert calls[-1][0] == calls[-1][1] > 0


# --- every file, damaged and removed -----------------------------------------------------------------------

PATTERNS = [
    "meta.json", "trimmed.json", "schemas/*/*.json", "hot/*.arrow", "big/*/*.arrow", "cold/*.json",
    "cold/*.commits.parquet", "cold/files/*/*.parquet", "consumers/*.json",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_flipped_bit_is_found_in_every_file(log: Path, pattern: str) -> None:
    for file in some(stored(log, pattern)):
        whole = file.read_bytes()
        for at in (1, len(whole) // 3, len(whole) // 2):
            if file.parent.name == "hot" and not covered(whole, at):
                continue
            flip(file, at)
            assert file.relative_to(log).as_posix() in paths(log), f"{file.name} at {at}"
            file.write_bytes(whole)
    assert flaws(log) == []


def covered(commit: bytes, at: int) -> bool:
    """Return true if a checksum covers this byte of a commit's file: none covers padding."""
    size = 16 + int(struct.unpack_from("<I", commit, 8)[0])
    header = json.loads(commit[16:size])
    begin = commit_file.align(size)
    own = [body for body in header["bodies"] if not body["piece"]]
    return at < size or any(begin + b["at"] <= at < begin + b["at"] + b["size"] for b in own)


@pytest.mark.parametrize(
    "pattern", [pattern for pattern in PATTERNS if pattern not in ("meta.json", "consumers/*.json")]
)
def test_a_file_that_was_removed_by_hand_is_found(log: Path, pattern: str) -> None:
    change_log = ChangeLog.open(log)
    newest = change_log.newest()
    seals = change_log.seal_index.seals
    needed = {file.file for seal in seals for file in seal.files}
    needed |= {f"cold/{seal.stem}{end}" for seal in seals for end in (".json", ".commits.parquet")}
    needed |= {f"hot/{commit:020d}.arrow" for commit in range(change_log.seal_index.last_commit + 1, newest + 1)}
    for file in some(stored(log, pattern)):
        name = file.relative_to(log).as_posix()
        whole = file.read_bytes()
        file.unlink()
        found = paths(log)
        if pattern.startswith(("hot", "cold")) and name not in needed:
            assert not found, f"another file replaces {name}"
        elif name == f"hot/{newest:020d}.arrow" or pattern in ("trimmed.json", "cold/*.json"):
            pass  # its loss shows elsewhere, or the log is as if it had never existed
        else:
            assert name in found
        file.write_bytes(whole)
    assert flaws(log) == []


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 100, b"PAR1", b"{}", b"[]"], ids=["empty", "zeros", "PAR1", "{}", "[]"]
)
def test_a_file_with_other_content_is_found(log: Path, content: bytes) -> None:
    for pattern in PATTERNS:
        file = stored(log, pattern)[-1]
        whole = file.read_bytes()
        file.write_bytes(content)
        assert file.relative_to(log).as_posix() in paths(log)
        file.write_bytes(whole)


def test_every_flaw_is_reported_and_not_only_the_first(log: Path) -> None:
    damaged = [stored(log, pattern)[0] for pattern in ("cold/files/*/*.parquet", "schemas/*/*.json", "big/*/*.arrow")]
    damaged.append(commit_path(log, ChangeLog.open(log).newest() - 1))
    for file in damaged:
        flip(file, file.stat().st_size // 2)
    (log / "consumers" / "broken.json").write_text("{")
    wanted = {file.relative_to(log).as_posix() for file in damaged} | {"consumers/broken.json"}
    assert wanted <= paths(log)


def test_the_rest_of_a_log_is_checked_when_its_meta_is_damaged(log: Path) -> None:
    (log / "meta.json").write_bytes(b"")
    assert paths(log) == {"meta.json"}
    flip(stored(log, "cold/files/*/*.parquet")[0], 100)
    assert len(paths(log)) == 2


def test_a_run_of_missing_commits_is_one_flaw(log: Path) -> None:
    change_log = ChangeLog.open(log)
    first, newest = change_log.seal_index.last_commit + 1 if change_log.newest() else 0, change_log.newest()
    assert newest - first >= 2
    for commit in range(first, newest):
        commit_path(log, commit).unlink()
    (flaw,) = flaws(log)
    assert flaw.message == f"commits {first} to {newest - 1} are missing"
    assert flaw.path == commit_path(log, first)


def test_the_newest_commit_must_have_a_file_of_its_own(diary: Diary) -> None:
    diary.commit(inserts(1))
    diary.commit(inserts(2))
    seal(diary.path)
    assert flaws(diary.path) == []
    commit_path(diary.path, 2).unlink()
    assert [flaw.message for flaw in flaws(diary.path)] == ["the newest commit has no file of its own"]


# --- sound files that do not match each other --------------------------------------------------------------


def with_header(file: Path, **fields: object) -> None:
    """Change fields of a commit's header, and make its checksum fit."""
    data = file.read_bytes()
    size = 16 + int(struct.unpack_from("<I", data, 8)[0])
    text = json.dumps(json.loads(data[16:size]) | fields, separators=(",", ":")).encode()
    head = struct.pack("<8sII", commit_file.MAGIC, len(text), zlib.crc32(text)) + text
    file.write_bytes(head.ljust(commit_file.align(len(head)), b"\0") + data[commit_file.align(size) :])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"start": "0/1"}, "does not start where the one before ended"),
        ({"next_seq": 9}, "not numbered"),
        ({"rows": 5}, "not numbered"),
        ({"log": "0" * 32}, "another commit or log"),
        ({"commit": 7}, "another commit or log"),
        ({"format": 2}, "format"),
    ],
)
def test_a_commit_that_does_not_fit_its_neighbours_is_found(
    diary: Diary, fields: dict[str, object], message: str
) -> None:
    diary.commit(inserts(1, 2))
    diary.commit(inserts(3, 4))
    diary.commit(inserts(5, 6))
    with_header(commit_path(diary.path, 2), **fields)
    found = [flaw for flaw in flaws(diary.path) if flaw.path == commit_path(diary.path, 2)]
    assert any(message in flaw.message for flaw in found), found


def with_seal(path: Path, stem: str, **fields: object) -> None:
    file = cold.seal_path(path, stem)
    stored_seal = json.loads(file.read_text())
    del stored_seal["crc"]
    file.write_bytes(records.encode(stored_seal | fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rows": 7}, "do not add up"),
        ({"files": []}, "do not hold the rows of its commits"),
        ({"next_seq": 9}, "not those of the seal"),
        ({"end": "0/FFFF"}, "not those of the seal"),
        ({"log": "0" * 32}, "another log"),
        ({"first_seq": 2}, "row numbers do not continue"),
        ({"start": "0/1"}, "does not start where"),
    ],
)
def test_a_seal_that_does_not_fit_its_files_is_found(diary: Diary, fields: dict[str, object], message: str) -> None:
    diary.commit(inserts(1, 2))
    seal(diary.path)
    diary.commit(inserts(3, 4))
    diary.commit(inserts(5, schema=OTHER))
    seal(diary.path, join=False)
    stem = f"{2:020d}-{3:020d}"
    with_seal(diary.path, stem, **fields)
    assert any(message in flaw.message for flaw in flaws(diary.path)), flaws(diary.path)


@pytest.mark.parametrize(
    ("name", "value"), [("rows", 1), ("first_seq", 2), ("last_seq", 9), ("last", 1), ("groups", [])]
)
def test_a_file_that_is_not_what_its_seal_says_is_found(diary: Diary, name: str, value: object) -> None:
    diary.commit(inserts(1, 2))
    diary.commit(inserts(3, 4))
    seal(diary.path)
    (stem,) = [stem for _, _, stem in cold.seal_stems(diary.path)]
    listed = json.loads(cold.seal_path(diary.path, stem).read_text())["files"]
    shop = next(file for file in listed if file["table"] == 1)
    with_seal(diary.path, stem, files=[*(file for file in listed if file is not shop), {**shop, name: value}])
    assert diary.path / shop["file"] in {flaw.path for flaw in flaws(diary.path)}


def test_a_digest_distinguishes_dense_numbers_from_others() -> None:
    dense = SeqDigest.of_range(5, 1005)
    assert SeqDigest.of(np.arange(5, 300)) + SeqDigest.of(np.arange(300, 1005)) == dense
    twice = np.arange(5, 1005)
    twice[10] = twice[11]
    assert SeqDigest.of(twice) != dense
    swapped = np.arange(5, 1005)
    swapped[10], swapped[20] = swapped[10] - 3, swapped[20] + 3
    assert SeqDigest.of(swapped).total == dense.total
    assert SeqDigest.of(swapped) != dense
    assert SeqDigest.of_range(1 << 62, (1 << 62) + 3) == SeqDigest.of(np.arange(1 << 62, (1 << 62) + 3))
    assert SeqDigest() == SeqDigest.of_range(7, 7)


def test_lists_of_commits_longer_than_a_batch_are_read_piece_by_piece(
    diary: Diary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_files, "LIST_ROWS", 3)
    for key in range(10):
        diary.commit(inserts(key))
    seal(diary.path)
    assert flaws(diary.path) == []


# --- the links of the glob ---------------------------------------------------------------------------------


def test_a_broken_or_missing_link_is_found_and_made_again(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "LINK_PAUSE_SECONDS", 0.0)
    view = log / "cold" / "1"
    shown = min(os.listdir(view))
    (view / shown).unlink()
    os.symlink("../../files/1/gone.parquet", view / "old.parquet")
    assert paths(log) == {f"cold/1/{shown}", "cold/1/old.parquet"}
    assert all("seal" in flaw.hint for flaw in flaws(log))
    Sealer(log).close()
    assert flaws(log) == []


# --- concurrent work ----------------------------------------------------------------------------------------


def test_a_large_transaction_partly_removed_by_cleaning_has_no_flaw(
    quick: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    diary, there = Diary(quick), files.file_exists
    large_transaction(diary, [inserts(1)], [inserts(2)])
    diary.commit()

    def cleaned(path: LogPath) -> bool:
        if path.parent.parent.name == "big":
            monkeypatch.setattr(files, "file_exists", there)
            with Sealer(quick, limits=SealLimits(commits=1)) as sealer:
                sealer.seal()
            shutil.rmtree(quick / "big")
        return there(path)

    monkeypatch.setattr(files, "file_exists", cleaned)
    found = verify.verify(quick)
    assert (found.flaws, found.rows) == ((), 2)


@pytest.mark.slow
def test_a_log_that_is_written_sealed_and_trimmed_meanwhile_has_no_flaw(quick: Path) -> None:
    diary = Diary(quick)
    diary.commit()
    done = threading.Event()

    def write() -> None:
        key = 0
        while not done.is_set():
            key += 1
            if key % 20 == 0:
                large_transaction(diary, [inserts(key), inserts(key, schema=THIRD)], [inserts(key, schema=OTHER)])
            diary.commit(inserts(key, key + 1), inserts(key, schema=OTHER))
            time.sleep(0.001)

    def order() -> None:
        log = ChangeLog.open(quick)
        policy = MaintenancePolicy(grace_seconds=0.0, retention=RetentionPolicy(age_seconds=0.3))
        while not done.is_set():
            maintain_once(log, policy, seal=True)

    with ThreadPoolExecutor() as pool:
        working = [pool.submit(write), pool.submit(order)]
        try:
            until, looks = time.monotonic() + 3.0, 0
            while time.monotonic() < until or looks <= 3 or not ChangeLog.open(quick).trimmed().commit:
                assert verify.verify(quick).flaws == ()
                looks += 1
        finally:
            done.set()
    for work in working:
        work.result()
    diary.close()
    assert verify.verify(quick).flaws == ()
