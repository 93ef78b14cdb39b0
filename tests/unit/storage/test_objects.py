"""Object paths behave like paths on a disk, and puts that must happen once do."""

from __future__ import annotations

import pickle
import re
import threading
import uuid
from pathlib import Path

import pytest

from tailrace.errors import ConfigError, LogFenced
from tailrace.storage import files, objects
from tailrace.storage.files import LogPath
from tailrace.storage.objects import ObjectPath

FILES = ("meta.json", "hot/1.arrow", "hot/.2.tmp", "schemas/1/1.json", "schemas/10/2.json", "cold/x.commits.parquet")


@pytest.fixture
def store() -> ObjectPath:
    return ObjectPath.parse(f"memory://{uuid.uuid4().hex}/a/log")


def filled(path: LogPath) -> LogPath:
    for name in FILES:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(name.encode())
    return path


# ---- names -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.json", "a.b.json", "a", ".hidden", "a.", ".a.tmp", "@tables.json"])
def test_an_object_path_has_the_parts_of_a_path(store: ObjectPath, name: str) -> None:
    ours, theirs = store / "x" / name, Path("/log/x") / name
    assert (ours.name, ours.stem, ours.suffix, ours.parent.name) == (
        theirs.name,
        theirs.stem,
        theirs.suffix,
        theirs.parent.name,
    )


def test_a_path_survives_pickling_as_its_url() -> None:
    path = ObjectPath.parse("s3://bucket//a/b/", endpoint="http://here:1", region=None)
    assert str(path) == "s3://bucket/a/b"
    assert str(path / "c") == "s3://bucket/a/b/c"
    assert str(ObjectPath.parse("s3://bucket")) == "s3://bucket"
    assert pickle.loads(pickle.dumps(path)).options == (("endpoint", "http://here:1"),)
    assert files.parse_log_path("s3://bucket/a/b") == path
    assert files.parse_log_path("/tmp/log") == Path("/tmp/log")


def test_both_spellings_of_a_store_name_one_path() -> None:
    ours, sparks = ObjectPath.parse("s3://bucket/a/b"), ObjectPath.parse("s3a://bucket/a/b/")
    assert sparks == ours
    assert str(sparks) == "s3://bucket/a/b"
    assert files.parse_log_path("s3a://bucket/a/b") == ours


@pytest.mark.parametrize(
    "url", ["s3://", "s3a://", "s3:///x", "s3://bucket/../x", "s3://bucket/a/./b", "s3://my bucket/x"]
)
def test_an_invalid_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="not the address"):
        ObjectPath.parse(url)


@pytest.mark.parametrize("url", ["gs://bucket/x", "s3n://bucket/x", "hdfs://host:8020/x", "abfss://c@account/x"])
def test_an_untested_store_is_refused_with_a_hint_at_the_tested_one(url: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot be at `{url.partition(':')[0]}://`") as caught:
        ObjectPath.parse(url)
    assert "s3a://" in caught.value.hint
    assert "Tests run against moto's S3 server" in caught.value.hint


@pytest.mark.parametrize(
    "url", ["s3a://KEY:secret@bucket/x", "s3a://KEY:se/cret@bucket/x", "KEY:secret://bucket/x", "s3://minio:9000/b"]
)
def test_credentials_in_an_address_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ObjectPath.parse(url)
    assert not re.search("KEY|cret", str(caught.value))


# ---- looking ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern", ["*", "*/*", "schemas/*/*.json", "hot/.*.tmp", "*/", "schemas/*/", "cold/*.parquet", "no/*"]
)
def test_a_glob_finds_what_it_finds_on_a_disk(store: ObjectPath, tmp_path: Path, pattern: str) -> None:
    def found(path: LogPath) -> set[str]:
        paths = [item for item in path.glob(pattern) if pattern.endswith("/") or not item.is_dir()]
        return {files.relative_name(path, item) for item in paths}

    assert found(filled(store)) == found(filled(tmp_path / "log"))


def test_existing_objects_are_listed_as_on_a_disk(store: ObjectPath, tmp_path: Path) -> None:
    def listing_of(path: LogPath) -> list[object]:
        names = sorted(files.list_names(path)), sorted(files.list_names(path / "schemas"))
        sizes = {files.relative_name(path, file): size for file, size in files.file_sizes(path).items()}
        later = sorted(file.name for file in files.file_sizes(path / "hot", "0"))
        there = [(path / name).exists() for name in ("meta.json", "hot", "schemas/1", "nothing")]
        return [names, sizes, later, there, (path / "hot").is_dir(), (path / "meta.json").is_dir()]

    assert listing_of(filled(store)) == listing_of(filled(tmp_path / "log"))


def test_a_missing_object_raises_and_its_deletion_is_no_error(store: ObjectPath) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        (store / "x").read_bytes()
    assert caught.value.filename == str(store / "x")
    (store / "x").unlink()
    files.delete_all([store / "x"])
    assert files.read_stamp(store / "x") is None


def test_ranges_are_read_even_of_an_empty_object(store: ObjectPath) -> None:
    (store / "x").write_bytes(b"0123456789")
    (store / "empty").write_bytes(b"")
    assert files.read_start(store / "x", 4) == (b"0123", 10)
    assert files.read_start(store / "x", 100) == (b"0123456789", 10)
    assert files.read_start(store / "empty", 4) == (b"", 0)
    assert files.read_range(store / "x", 4, 3) == b"456"
    assert bytes(files.read_view(store / "x")) == b"0123456789"


def test_large_objects_are_cached_in_a_file_without_a_name(store: ObjectPath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_IN_MEMORY_BYTES_MAX", 10)
    monkeypatch.setattr(objects, "_KEPT_BYTES_MAX", 250)
    for name in "abc":
        (store / name).write_bytes(name.encode() * 100)
    held = files.cached_view(store / "a")
    assert [bytes(files.cached_view(store / name)) for name in "abc"] == [b"a" * 100, b"b" * 100, b"c" * 100]
    assert bytes(held) == b"a" * 100
    (store / "a").write_bytes(b"other")
    assert bytes(files.cached_view(store / "a")) == b"other"


# ---- once ------------------------------------------------------------------------------------------------


def test_exactly_one_of_many_concurrent_puts_gets_a_name(store: ObjectPath) -> None:
    won: list[int] = []
    begin = threading.Barrier(8)

    def take(number: int) -> None:
        begin.wait()
        try:
            files.create(store / "name", b"%d" % number)
        except FileExistsError:
            return
        won.append(number)

    threads = [threading.Thread(target=take, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert (store / "name").read_bytes() == b"%d" % won[0]


def test_a_taken_name_is_ours_only_with_our_own_bytes(store: ObjectPath) -> None:
    files.create(store / "name", b"ours")
    files.create(store / "name", b"ours")
    with pytest.raises(FileExistsError):
        files.create(store / "name", b"theirs")


def test_a_record_is_replaced_only_if_unchanged_since_it_was_read(store: ObjectPath) -> None:
    path = store / "record"
    files.compare_and_swap(path, b"1", None)
    before = files.read_stamp(path)
    files.compare_and_swap(path, b"2", before)
    with pytest.raises(FileExistsError):
        files.compare_and_swap(path, b"3", before)
    with pytest.raises(FileExistsError):
        files.compare_and_swap(path, b"3", None)
    with pytest.raises(LogFenced), files.refuse_second_writer(path):
        files.compare_and_swap(path, b"3", before)
    assert path.read_bytes() == b"2"


def test_append_adds_to_the_end_of_a_file(store: ObjectPath, tmp_path: Path) -> None:
    for path in (store / "lines", tmp_path / "lines"):
        files.append(path, b"one\n")
        files.append(path, b"two\n")
        with files.open_for_reading(path) as stream:
            assert list(stream) == [b"one\n", b"two\n"]
