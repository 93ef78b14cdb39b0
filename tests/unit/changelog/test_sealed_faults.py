"""Sealed logs: no flipped bit and no missing file goes unnoticed.

A restored log is complete again, whatever ran meanwhile.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tailrace.changelog.format.commit_file import commit_path
from tailrace.changelog.format.seal import commits_path, seal_path
from tailrace.changelog.maintain.retention import RetentionPolicy, trim
from tailrace.changelog.maintain.seal_contents import SealLimits
from tailrace.changelog.maintain.sealer import Sealer
from tailrace.changelog.read import consumers
from tailrace.changelog.read.reader import ChangeLog
from tailrace.changelog.write.writer import LogWriter
from tailrace.errors import LogCorrupt, LogError, LogUnusable
from tests.support.changes import SHOP
from tests.support.logs import OTHER, Diary, Row, in_order, inserts, quick_folder, rows_of, seal
from tests.support.windows import SOURCE

GONE = 3
"""The last commit that is trimmed."""
FLIPS = 40


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[Row]]]:
    """A log with everything, and its remaining rows.

    It is trimmed and has two seals, a large transaction and unsealed commits.
    """
    with quick_folder(tmp_path_factory.mktemp("original")) as folder:
        diary = Diary(folder / "log")
        diary.commit()
        diary.commit(inserts(1, 2))
        diary.commit(inserts(3, schema=OTHER))
        seal(diary.path)
        diary.commit(inserts(4, 5), inserts(6, schema=OTHER))
        diary.commit(inserts(7, 8, schema=OTHER))
        seal(diary.path)
        consumers.Consumer.open(diary.path, "reader", wanted=None, start=(GONE, 0)).save()
        with Sealer(diary.path) as sealer:
            trim(sealer, RetentionPolicy(age_seconds=0.0))
        diary.commit(inserts(9), inserts(10, schema=OTHER))
        diary.commit(inserts(11))
        seal(diary.path)
        diary.piece(inserts(12, 13), inserts(14, schema=OTHER))
        diary.piece(inserts(15))
        diary.finish(inserts(16))
        diary.commit(inserts(17, 18), inserts(19, schema=OTHER))
        diary.commit(inserts(20))
        diary.close()
        assert ChangeLog.open(diary.path).trimmed().commit == GONE
        yield diary.path, diary.rows(after=GONE)


@pytest.fixture
def log(original: tuple[Path, list[Row]], quick: Path) -> Path:
    shutil.copytree(original[0], quick, symlinks=True)
    return quick


@pytest.fixture
def rows(original: tuple[Path, list[Row]]) -> list[Row]:
    return original[1]


def stem(first: int, last: int) -> str:
    return f"{first:020d}-{last:020d}"


FILES: dict[str, Callable[[Path], Path]] = {
    "what the log is": lambda log: log / "meta.json",
    "what is gone": lambda log: log / "trimmed.json",
    "a seal": lambda log: seal_path(log, stem(4, 5)),
    "the last seal": lambda log: seal_path(log, stem(6, 7)),
    "the commits of a seal": lambda log: commits_path(log, stem(4, 5)),
    "sealed rows": lambda log: Path(str(ChangeLog.open(log).files("public.things")[0])),
    "a schema": lambda log: log / "schemas" / "1" / "1.json",
    "a piece": lambda log: min((log / "big" / f"{8:020d}").iterdir()),
    "a commit": lambda log: commit_path(log, 9),
}


def read(log: Path, to: list[Row], after: int = GONE) -> None:
    """Read all that the log has; rows before an error stay in `to`."""
    for batch in ChangeLog.open(log).follow(after):
        to += rows_of([batch])


def test_the_log_is_whole(log: Path, rows: list[Row]) -> None:
    found: list[Row] = []
    read(log, found)
    assert in_order(found) == rows


# --- flipped bits ------------------------------------------------------------------------------------------


def spots(data: bytes) -> list[int]:
    """Some bytes anywhere, and the first and last ones."""
    some = random.sample(range(len(data)), min(FLIPS, len(data)))
    return sorted({*some, 0, 1, 8, 12, len(data) - 1, len(data) - 5})


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_in_a_sealed_log_is_found_before_a_row_is_delivered(
    log: Path, rows: list[Row], name: str
) -> None:
    path = FILES[name](log)
    good = path.read_bytes()
    kept = {row.seq: row for row in rows}
    unnoticed = []
    for spot in spots(good):
        bad = bytearray(good)
        bad[spot] ^= 1 << random.randrange(8)
        path.write_bytes(bad)
        found: list[Row] = []
        try:
            read(log, found)
        except LogCorrupt as error:
            caught_error = error
        else:
            assert in_order(found) == rows, "an unnoticed flip must have changed no row"
            unnoticed.append(spot)
            continue
        assert all(row == kept[row.seq] for row in found), f"a wrong row was delivered, byte {spot}"
        assert caught_error.fields["path"] == path, f"byte {spot}: {caught_error}"
        assert caught_error.hint
    path.write_bytes(good)
    # Zeros between the bodies of a commit mean nothing, nor does the name of the checksum in meta.json.
    padded = name in ("a piece", "a commit")
    assert len(unnoticed) <= (FLIPS // 2 if padded else 3 if name == "what the log is" else 0), unnoticed


@pytest.mark.parametrize("name", ["sealed rows", "the commits of a seal", "a seal"])
@pytest.mark.parametrize(
    "damage",
    [lambda data: b"", lambda data: data[:-1], lambda data: bytes(len(data))],
    ids=["nothing left", "a byte short", "zeros"],
)
def test_a_torn_file_is_found(log: Path, name: str, damage: Callable[[bytes], bytes]) -> None:
    path = FILES[name](log)
    path.write_bytes(damage(path.read_bytes()))
    found: list[Row] = []
    with pytest.raises(LogCorrupt) as caught:
        read(log, found)
    assert found == []
    assert caught.value.fields["path"] == path


@pytest.mark.parametrize("name", ["sealed rows", "the commits of a seal"])
def test_a_damaged_seal_is_not_merged(log: Path, name: str) -> None:
    path = FILES[name](log)
    bad = bytearray(path.read_bytes())
    bad[len(bad) // 2] ^= 1
    path.write_bytes(bad)
    with Sealer(log, limits=SealLimits(merge_count=2)) as sealer, pytest.raises(LogCorrupt) as caught:
        sealer.merge_seals()
    assert caught.value.fields["path"] == path
    assert not seal_path(log, stem(4, 7)).exists()


def test_a_seal_of_another_log_is_refused(log: Path, tmp_path: Path) -> None:
    other = Diary(tmp_path / "other")
    for key in range(5):
        other.commit(inserts(key))
    with Sealer(other.path, limits=SealLimits(commits=3)) as sealer:
        sealer.seal()
    other.close()
    shutil.copy(seal_path(other.path, stem(4, 5)), seal_path(log, stem(4, 5)))
    with pytest.raises(LogCorrupt, match="another log") as caught:
        read(log, [])
    assert caught.value.fields["path"] == seal_path(log, stem(4, 5))


# --- removed by hand ---------------------------------------------------------------------------------------


def disturb(log: Path) -> None:
    """Run all maintenance, as far as it can."""
    with suppress(LogError):
        LogWriter(log, SOURCE).close()
    for _ in range(2):
        with suppress(LogError), Sealer(log, limits=SealLimits(merge_count=2)) as sealer:
            with suppress(LogError):
                sealer.seal()
            with suppress(LogError):
                sealer.merge_seals()
            sealer.clean(0.0)
            trim(sealer, RetentionPolicy(age_seconds=0.0))


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_reported_and_a_restored_log_is_complete(
    log: Path, rows: list[Row], tmp_path: Path, name: str
) -> None:
    path = FILES[name](log)
    kept = shutil.move(path, tmp_path / "kept")
    found: list[Row] = []
    with pytest.raises((LogCorrupt, LogUnusable)) as caught:
        read(log, found, after=0 if name == "what is gone" else GONE)
    assert caught.value.hint
    assert all(row in rows for row in found)
    disturb(log)
    assert not path.exists(), "nothing replaces it"
    shutil.move(kept, path)
    found = []
    read(log, found)
    assert in_order(found) == rows


def test_a_missing_newest_commit_is_an_earlier_end_and_nothing_is_swept(
    log: Path, rows: list[Row], tmp_path: Path
) -> None:
    """Only the source can notice, when capture starts."""
    for commit in (10, 9, 8):
        shutil.move(commit_path(log, commit), tmp_path / str(commit))
    writer = LogWriter(log, SOURCE)
    assert writer.commit == 7
    writer.close()
    disturb(log)
    for commit in (10, 9, 8):
        shutil.move(tmp_path / str(commit), commit_path(log, commit))
    found: list[Row] = []
    read(log, found)
    assert in_order(found) == rows


def test_the_newest_commits_missing_file_is_reported_although_it_is_sealed(log: Path) -> None:
    seal(log)
    commit_path(log, 10).unlink()
    with pytest.raises(LogCorrupt, match="missing") as caught:
        LogWriter(log, SOURCE)
    assert caught.value.fields["path"] == commit_path(log, 10)


def test_a_log_without_meta_json_is_not_started_over(log: Path) -> None:
    (log / "meta.json").unlink()
    with pytest.raises(LogCorrupt, match=r"meta\.json is missing"):
        LogWriter(log, SOURCE)
    assert not (log / "meta.json").exists()


def test_the_number_of_a_missing_schema_is_not_used_again(log: Path) -> None:
    (log / "schemas" / "2" / "1.json").unlink()
    with pytest.raises(LogCorrupt, match="schema is missing"):
        LogWriter(log, SOURCE)


def test_the_tables_of_the_log_are_those_of_the_test() -> None:
    assert (str(SHOP.table), str(OTHER.table)) == ("public.things", "public.other")
