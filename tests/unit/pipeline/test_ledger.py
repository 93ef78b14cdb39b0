"""Points across tables: what was noted is found again, by position and by time, whatever became of the file."""

from __future__ import annotations

import os
import time
import zlib
from pathlib import Path

import pytest

from tailrace.errors import ConfigError
from tailrace.model.position import Lsn
from tailrace.model.schema import TableId
from tailrace.pipeline import ledger
from tailrace.pipeline.ledger import KEPT_SECONDS, NEAR_POINTS, Absence, Ledger, Point
from tailrace.pipeline.points import TablesAt

A, B, DOTTED = TableId("public", "a"), TableId("public", "b"), TableId("my.schema", "x.y")


NAMES = {"a": A, "b": B, "dotted": DOTTED}
BUSY, FAILED = Absence(state="live", why="it was being worked on"), Absence(state="failed", why="value-unfit")


def point(number: int, missing: dict[str, Absence] | None = None, **versions: int) -> Point:
    return Point(
        commit=number, position=Lsn(number * 10), committed_at=number * 1_000_000,
        versions={NAMES[name]: version for name, version in versions.items()},
        missing={NAMES[name]: absence for name, absence in (missing or {}).items()},
    )  # fmt: skip


POINTS = [point(1, a=0), point(2, a=1, b=0), point(5, a=1, b=3, dotted=7), point(6, b=4, dotted=7), point(9, a=2, b=4)]


def noted(folder: Path, points: list[Point]) -> Ledger:
    made = Ledger(folder)
    for item in points:
        made.note(item)
    return made


def test_what_was_noted_is_read_back(tmp_path: Path) -> None:
    assert list(noted(tmp_path, POINTS).points()) == POINTS
    assert list(Ledger(tmp_path).points()) == POINTS


def test_after_a_point_that_could_not_be_written_the_next_is_whole(tmp_path: Path) -> None:
    made, folder, aside = noted(tmp_path, POINTS[:2]), tmp_path / ledger.FOLDER, tmp_path / "aside"
    folder.rename(aside)
    folder.touch()  # in its place
    made.note(POINTS[2])
    folder.unlink()
    aside.rename(folder)
    made.note(POINTS[3])
    made.note(POINTS[4])
    assert list(made.points()) == [*POINTS[:2], *POINTS[3:]]
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("per_file", [1, 2, 1000])
def test_the_last_point_up_to_a_position_or_a_time_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, per_file: int
) -> None:
    monkeypatch.setattr(ledger, "POINTS_MAX", per_file)
    made = noted(tmp_path, POINTS)
    assert made.at() == POINTS[-1]
    for number, found in ((1, 0), (2, 1), (3, 1), (4, 1), (5, 2), (6, 3), (8, 3), (9, 4), (100, 4)):
        assert made.at(position=Lsn(number * 10)) == POINTS[found]
        assert made.at(committed_at=number * 1_000_000) == POINTS[found]
        assert made.at(committed_at=number * 1_000_000 + 999_999) == POINTS[found]


def test_what_is_too_early_or_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no point across the tables has been noted yet"):
        Ledger(tmp_path).at()
    with pytest.raises(ConfigError, match="the first point that is known is later") as refused:
        noted(tmp_path, POINTS).at(position=Lsn(9))
    assert "1970-01-01T00:00:01" in refused.value.headline


def test_a_point_that_says_nothing_new_is_not_noted(tmp_path: Path) -> None:
    made = noted(tmp_path, [point(1, a=0), point(2, a=0), point(3, a=1)])
    assert [item.commit for item in made.points()] == [1, 3]


def test_a_torn_or_bent_line_ends_its_file_and_a_new_process_begins_another(tmp_path: Path) -> None:
    noted(tmp_path, POINTS)
    (path,) = (tmp_path / "ledger").iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    assert list(Ledger(tmp_path).points()) == POINTS[:-1]
    path.write_bytes(whole.replace(b'"commit": 5', b'"commit": 4'))
    assert list(Ledger(tmp_path).points()) == POINTS[:2]
    noted(tmp_path, [point(20, a=9)])
    assert Ledger(tmp_path).at() == point(20, a=9)


def test_old_points_go_and_a_ledger_that_cannot_be_written_stops_nobody(tmp_path: Path) -> None:
    noted(tmp_path, POINTS)
    (path,) = (tmp_path / "ledger").iterdir()
    old = time.time() - KEPT_SECONDS - 60
    os.utime(path, (old, old))
    assert [item.commit for item in noted(tmp_path, [point(20, a=9)]).points()] == [20]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "ledger").write_text("a file where the folder should be")
    noted(tmp_path / "other", POINTS)


MISSED = [
    point(1, {"b": BUSY}, a=0), point(2, {"b": FAILED}, a=1), point(3, {"b": FAILED}, a=2), point(4, a=3, b=1),
    point(5, {"a": BUSY, "dotted": BUSY}, b=2), point(6, {"a": BUSY}, b=3, dotted=1),
]  # fmt: skip


@pytest.mark.parametrize("per_file", [1, 2, 1000])
def test_why_a_table_is_missing_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, per_file: int) -> None:
    monkeypatch.setattr(ledger, "POINTS_MAX", per_file)
    assert list(noted(tmp_path, MISSED).points()) == MISSED


def test_a_point_that_only_another_table_is_missing_from_says_something_new(tmp_path: Path) -> None:
    made = noted(tmp_path, [point(1, {"b": BUSY}, a=0), point(2, {"b": BUSY}, a=0), point(3, {"b": FAILED}, a=0)])
    assert [item.commit for item in made.points()] == [1, 3]


@pytest.mark.parametrize("per_file", [1, 2, 1000])
def test_a_table_that_is_missing_in_passing_is_found_shortly_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, per_file: int
) -> None:
    monkeypatch.setattr(ledger, "POINTS_MAX", per_file)
    made = noted(tmp_path, MISSED)
    assert made.at() == MISSED[3]
    assert made.at(position=Lsn(50)) == MISSED[3]
    assert made.at(position=Lsn(30)) == MISSED[2], "one that has failed holds back nobody"
    assert made.at(position=Lsn(10)) == MISSED[0], "there is no better one"


def test_a_table_that_is_missing_for_long_holds_back_nobody(tmp_path: Path) -> None:
    made = noted(tmp_path, [point(0, a=0, b=0), *(point(n, {"b": BUSY}, a=n) for n in range(1, NEAR_POINTS + 5))])
    assert made.at(committed_at=(NEAR_POINTS - 1) * 1_000_000).commit == 0
    assert made.at().commit == NEAR_POINTS + 4


def test_how_many_are_missing_in_passing_is_known_of_the_last_point(tmp_path: Path) -> None:
    made = Ledger(tmp_path)
    assert made.passing == 0
    counts = []
    for item in MISSED:
        made.note(item)
        counts.append(made.passing)
    assert counts == [1, 0, 0, 0, 2, 1]


def test_points_noted_before_tables_could_be_missing_are_read(tmp_path: Path) -> None:
    (tmp_path / "ledger").mkdir()
    text = b'{"commit": 7, "position": "0/46", "committed_at": 7000000, "tables": [["public", "a", 3]], "gone": []}'
    line = b"%08x %s\n" % (zlib.crc32(text), text)
    (tmp_path / "ledger" / f"{7:020d}-{1:020d}.jsonl").write_bytes(line)
    assert Ledger(tmp_path).at() == point(7, a=3)


def test_asked_for_a_table_that_is_missing_the_tables_of_a_point_say_why() -> None:
    found = TablesAt({}, MISSED[1])
    with pytest.raises(ConfigError, match="no version at this point") as refused:
        found["public.b"]
    assert "value-unfit" in refused.value.headline
    with pytest.raises(KeyError):
        found["public.c"]
    assert "public.b" not in found
