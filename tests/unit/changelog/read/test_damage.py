"""Damage is an error that names the file, before any of its rows is delivered."""

from __future__ import annotations

import json
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from tailrace.changelog.format import commit_file
from tailrace.changelog.format.commit_file import commit_path
from tailrace.changelog.read.reader import ChangeLog
from tailrace.changelog.write.writer import LogWriter
from tailrace.errors import LogCorrupt, LogError, LogUnusable
from tailrace.model.batch import ChangeBatch
from tests.support.windows import SOURCE, ids, rows_window

Damage = Callable[[bytes], bytes]


def flipped(data: bytes, at: int) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 1
    return bytes(changed)


def deliver(folder: Path, to: list[ChangeBatch]) -> None:
    """Read the whole log; rows before an error stay in `to`."""
    for batch in ChangeLog.open(folder).follow(0):
        to.append(batch)  # noqa: PERF402 - extending would lose them


def header_bytes(data: bytes) -> int:
    return 16 + int(struct.unpack_from("<I", data, 8)[0])


def with_header(data: bytes, **fields: object) -> bytes:
    """Return the commit with header fields changed and a matching checksum."""
    size = header_bytes(data)
    stored = json.loads(data[16:size]) | fields
    text = json.dumps(stored, separators=(",", ":")).encode()
    head = struct.pack("<8sII", commit_file.MAGIC, len(text), zlib.crc32(text)) + text
    return head.ljust(commit_file.align(len(head)), b"\0") + data[commit_file.align(size) :]


DAMAGES: dict[str, Damage] = {
    "a bit of the magic": lambda data: flipped(data, 0),
    "a bit of the header's length": lambda data: flipped(data, 8),
    "the highest bit of the header's length": lambda data: flipped(data, 11),
    "a bit of the header's checksum": lambda data: flipped(data, 12),
    "the first bit of the header": lambda data: flipped(data, 16),
    "a bit within the header": lambda data: flipped(data, header_bytes(data) // 2),
    "the last bit of the header": lambda data: flipped(data, header_bytes(data) - 1),
    "the first bit of the body": lambda data: flipped(data, commit_file.align(header_bytes(data))),
    "a bit within the body": lambda data: flipped(data, commit_file.align(header_bytes(data)) + 200),
    "nothing left": lambda data: b"",
    "a few bytes left": lambda data: data[:10],
    "half the header left": lambda data: data[: header_bytes(data) // 2],
    "the header left": lambda data: data[: header_bytes(data)],
    "half the body left": lambda data: data[: commit_file.align(header_bytes(data)) + 200],
    "zeros, as after a crash of the machine": lambda data: bytes(len(data)),
    "another program's file": lambda data: b"PAR1" + data[4:],
    "another log's commit": lambda data: with_header(data, log="0" * 32),
    "another commit's number": lambda data: with_header(data, commit=3),
    "another position in the source's log": lambda data: with_header(data, start="0/1"),
    "a format of the future": lambda data: with_header(data, format=2),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_commit_is_named_and_none_of_its_rows_delivered(filled: Path, damage: Damage) -> None:
    path = commit_path(filled, 2)
    path.write_bytes(damage(path.read_bytes()))
    delivered: list[ChangeBatch] = []
    with pytest.raises(LogCorrupt) as caught:
        deliver(filled, delivered)
    assert delivered == []
    assert caught.value.fields["path"] == path
    assert caught.value.hint


SOUND_ALONE = ("another commit's number", "another position in the source's log")
"""Damage of a last commit that only a comparison with the one before shows."""


@pytest.mark.parametrize("name", [name for name in DAMAGES if name not in SOUND_ALONE])
def test_a_damaged_last_commit_is_reported_and_never_overwritten(filled: Path, name: str) -> None:
    path = commit_path(filled, 3)
    damaged = DAMAGES[name](path.read_bytes())
    path.write_bytes(damaged)
    with pytest.raises(LogCorrupt) as caught:
        LogWriter(filled, SOURCE)
    assert caught.value.fields["path"] == path
    assert path.read_bytes() == damaged
    assert sorted(found.name for found in (filled / "hot").iterdir()) == [
        commit_path(filled, n).name for n in (1, 2, 3)
    ]


TORN = [name for name in DAMAGES if "left" in name or "zeros" in name]


@pytest.mark.parametrize("name", TORN)
def test_a_torn_newest_commit_is_reported_and_captured_again_once_it_is_moved_away(filled: Path, name: str) -> None:
    """The disk lies: the file had been made durable before it had its name."""
    path = commit_path(filled, 3)
    path.write_bytes(DAMAGES[name](path.read_bytes()))
    with pytest.raises(LogCorrupt) as caught:
        LogWriter(filled, SOURCE)
    assert "machine has just crashed" in caught.value.hint
    assert f"move the newest commit ({path.name}) away" in caught.value.hint
    path.rename(path.with_name("moved away"))
    writer = LogWriter(filled, SOURCE)
    assert writer.position.value == 200, "from here the source is read again, or reports that it cannot"
    writer.append(rows_window(200, 300, 4, 5))
    writer.close()
    assert len(ids(list(ChangeLog.open(filled).follow(0)))) == 5


def test_rows_before_the_damage_are_delivered(filled: Path) -> None:
    path = commit_path(filled, 3)
    path.write_bytes(flipped(path.read_bytes(), 20))
    delivered: list[ChangeBatch] = []
    with pytest.raises(LogCorrupt):
        deliver(filled, delivered)
    assert ids(delivered) == [(1, 1), (2, 2), (3, 3)]


def test_a_missing_commit_is_reported_and_not_skipped(filled: Path) -> None:
    commit_path(filled, 2).unlink()
    with pytest.raises(LogCorrupt, match="missing") as caught:
        list(ChangeLog.open(filled).follow(0))
    assert caught.value.fields["path"] == commit_path(filled, 2)


def test_a_commit_under_another_number_is_reported(filled: Path) -> None:
    shutil.copy(commit_path(filled, 3), commit_path(filled, 2))
    with pytest.raises(LogCorrupt, match="another commit or log"):
        list(ChangeLog.open(filled).follow(0))


def test_a_commit_of_a_newer_format_is_reported(filled: Path) -> None:
    path = commit_path(filled, 2)
    path.write_bytes(with_header(path.read_bytes(), format=2))
    with pytest.raises(LogCorrupt, match="format this version does not know") as caught:
        list(ChangeLog.open(filled).headers(0))
    assert "newer" in caught.value.hint


# --- meta.json ---------------------------------------------------------------------------------------------

METAS: dict[str, bytes] = {
    "empty": b"",
    "cut": b'{"format": 1, "lo',
    "not utf-8": b"\xff\xfe\xfd",
    "zeros": bytes(100),
    "a list": b"[]",
    "a number": b"1",
    "without an id": b'{"format": 1, "source": {"kind": "a", "system": "b", "database": "c", "timeline": 1}}',
    "without a source": b'{"format": 1, "log": "x"}',
    "a source that lacks something": b'{"format": 1, "log": "x", "source": {"kind": "a"}}',
}


@pytest.mark.parametrize("content", METAS.values(), ids=METAS.keys())
def test_a_log_whose_meta_cannot_be_read_is_an_error_and_not_a_new_log(filled: Path, content: bytes) -> None:
    meta = filled / "meta.json"
    meta.write_bytes(content)
    for start in (lambda: ChangeLog.open(filled), lambda: LogWriter(filled, SOURCE)):
        with pytest.raises(LogCorrupt) as caught:
            start()
        assert caught.value.fields["path"] == meta
    assert meta.read_bytes() == content


def test_a_log_of_a_newer_format_is_reported(filled: Path) -> None:
    meta = filled / "meta.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"format": 99}))
    with pytest.raises(LogCorrupt, match="format this version does not know"):
        LogWriter(filled, SOURCE)


def test_a_folder_where_meta_should_be_is_an_error(filled: Path) -> None:
    (filled / "meta.json").unlink()
    (filled / "meta.json").mkdir()
    with pytest.raises(LogError):
        ChangeLog.open(filled)


# --- schemas -----------------------------------------------------------------------------------------------


def schema_file(folder: Path) -> Path:
    return folder / "schemas" / "1" / "1.json"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"1", b"{}", b"\xff"], ids=str)
def test_an_unreadable_schema_is_named(filled: Path, content: bytes) -> None:
    schema_file(filled).write_bytes(content)
    for start in (lambda: list(ChangeLog.open(filled).follow(0)), lambda: LogWriter(filled, SOURCE)):
        with pytest.raises(LogCorrupt) as caught:
            start()
        assert caught.value.fields["path"] == schema_file(filled)


def test_a_missing_schema_is_named(filled: Path) -> None:
    schema_file(filled).unlink()
    with pytest.raises(LogCorrupt) as caught:
        list(ChangeLog.open(filled).follow(0))
    assert caught.value.fields["path"] == schema_file(filled)


def test_a_flipped_bit_in_a_schema_is_found(filled: Path) -> None:
    text = schema_file(filled).read_bytes()
    assert b'"big"' in text
    schema_file(filled).write_bytes(text.replace(b'"big"', b'"bif"'))
    with pytest.raises(LogCorrupt):
        list(ChangeLog.open(filled).follow(0))


def test_a_schema_of_a_newer_format_is_reported(filled: Path) -> None:
    stored = json.loads(schema_file(filled).read_text()) | {"format": 99}
    schema_file(filled).write_text(json.dumps(stored))
    with pytest.raises(LogCorrupt):
        list(ChangeLog.open(filled).follow(0))


# --- leftovers, strangers, missing folders -----------------------------------------------------------------


def test_leftovers_of_a_crash_are_swept_and_never_read(filled: Path) -> None:
    whole = commit_path(filled, 3).read_bytes()
    leftovers = [
        filled / "hot" / f".{4:020d}.arrow.tmp",
        filled / "hot" / f".{5:020d}.arrow.123.tmp",
        filled / ".meta.json.99.tmp",
        filled / "schemas" / "1" / ".2.json.77.tmp",
    ]
    for leftover in leftovers:
        leftover.write_bytes(whole)
    assert ChangeLog.open(filled).newest() == 3
    assert len(ids(list(ChangeLog.open(filled).follow(0)))) == 5
    writer = LogWriter(filled, SOURCE)
    assert writer.commit == 3
    assert all(leftover.exists() for leftover in leftovers)  # another writer may still be at work on them
    writer.append(rows_window(300, 400, 6))
    writer.close()
    assert [leftover for leftover in leftovers if leftover.exists()] == []
    assert ids(list(ChangeLog.open(filled).follow(3))) == [(6, 6)]


def test_reading_sweeps_nothing(filled: Path) -> None:
    leftover = filled / "hot" / f".{4:020d}.arrow.tmp"
    leftover.write_bytes(b"half a commit")
    list(ChangeLog.open(filled).follow(0))
    assert leftover.exists()


@pytest.mark.parametrize("name", ["2 (copy).arrow", "00000000000000000002.arrow.bak", "README", "4.parquet"])
def test_a_foreign_file_among_the_commits_is_not_touched(filled: Path, name: str) -> None:
    stranger = filled / "hot" / name
    stranger.write_bytes(b"whatever")
    assert len(ids(list(ChangeLog.open(filled).follow(0)))) == 5
    LogWriter(filled, SOURCE).close()
    assert stranger.exists()


def test_a_log_that_lost_its_commits_is_not_an_empty_log(filled: Path) -> None:
    shutil.rmtree(filled / "hot")
    for start in (lambda: list(ChangeLog.open(filled).follow(0)), lambda: LogWriter(filled, SOURCE)):
        with pytest.raises((LogCorrupt, LogUnusable)):
            start()
