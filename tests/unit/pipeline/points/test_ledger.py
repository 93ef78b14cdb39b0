"""Recorded consistent points are found by position and by time, also after a torn or failed write."""

from __future__ import annotations

import json
import os
import time
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tailrace.control.point_in_time import TablesAt, select_tables
from tailrace.errors import ConfigError
from tailrace.model.position import Lsn
from tailrace.model.schema import TableId
from tailrace.pipeline.points import ledger
from tailrace.pipeline.points.ledger import KEPT_SECONDS, NEAR_POINTS, Absence, ConsistentPoint, Ledger

A, B, DOTTED = TableId("public", "a"), TableId("public", "b"), TableId("my.schema", "x.y")


NAMES = {"a": A, "b": B, "dotted": DOTTED}
BUSY, FAILED = Absence(state="live", why="it was busy"), Absence(state="failed", why="value-unfit")


def point(number: int, missing: dict[str, Absence] | None = None, **versions: int) -> ConsistentPoint:
    return ConsistentPoint(
        commit=number,
        position=Lsn(number * 10),
        committed_at=number * 1_000_000,
        versions={NAMES[name]: version for name, version in versions.items()},
        missing={NAMES[name]: absence for name, absence in (missing or {}).items()},
    )


POINTS = [point(1, a=0), point(2, a=1, b=0), point(5, a=1, b=3, dotted=7), point(6, b=4, dotted=7), point(9, a=2, b=4)]


def recorded(folder: Path, points: list[ConsistentPoint]) -> Ledger:
    stored = Ledger(folder)
    for item in points:
        stored.record(item)
    return stored


def test_recorded_points_are_read_back(tmp_path: Path) -> None:
    assert list(recorded(tmp_path, POINTS).points()) == POINTS
    assert list(Ledger(tmp_path).points()) == POINTS


def test_lake_table_ids_are_read_back_and_older_lines_have_none(tmp_path: Path) -> None:
    points = [
        replace(point(1, a=3, b=1), lake_table_ids={A: "one", B: "b"}),
        replace(point(2, a=4), lake_table_ids={A: "one"}),
        replace(point(3, a=0, b=1), lake_table_ids={A: "two", B: "b"}),
    ]
    stored = recorded(tmp_path, points)
    assert list(stored.points()) == points
    (path,) = (tmp_path / ledger.FOLDER).iterdir()
    lines = [json.loads(line.partition(b" ")[2]) for line in path.read_bytes().splitlines()]
    older = [json.dumps({name: value for name, value in line.items() if name != "identities"}) for line in lines]
    path.write_text("".join(f"{zlib.crc32(text.encode()):08x} {text}\n" for text in older))
    assert list(Ledger(tmp_path).points()) == [replace(one, lake_table_ids={}) for one in points]


def test_the_point_after_a_failed_write_is_complete(tmp_path: Path) -> None:
    stored, folder, moved = recorded(tmp_path, POINTS[:2]), tmp_path / ledger.FOLDER, tmp_path / "aside"
    folder.rename(moved)
    folder.touch()  # in its place
    stored.record(POINTS[2])
    folder.unlink()
    moved.rename(folder)
    stored.record(POINTS[3])
    stored.record(POINTS[4])
    assert list(stored.points()) == [*POINTS[:2], *POINTS[3:]]
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("per_file", [1, 2, 1000])
def test_the_last_point_up_to_a_position_or_a_time_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, per_file: int
) -> None:
    monkeypatch.setattr(ledger, "POINTS_MAX", per_file)
    stored = recorded(tmp_path, POINTS)
    assert stored.at() == POINTS[-1]
    for number, found in ((1, 0), (2, 1), (3, 1), (4, 1), (5, 2), (6, 3), (8, 3), (9, 4), (100, 4)):
        assert stored.at(position=Lsn(number * 10)) == POINTS[found]
        assert stored.at(committed_at=number * 1_000_000) == POINTS[found]
        assert stored.at(committed_at=number * 1_000_000 + 999_999) == POINTS[found]


def timed(number: int, seconds: int) -> ConsistentPoint:
    return replace(point(number, a=number), committed_at=seconds * 1_000_000)


@pytest.mark.parametrize("per_file", [1, 2, 1000])
@pytest.mark.parametrize("processes", [1, 4], ids=["one process", "one each"])
def test_a_point_up_to_a_time_has_nothing_committed_later_even_if_the_source_clock_went_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, per_file: int, processes: int
) -> None:
    monkeypatch.setattr(ledger, "POINTS_MAX", per_file)
    points = [timed(1, 100), timed(2, 200), timed(3, 150), timed(4, 250)]
    for begin in range(0, 4, 4 // processes):
        recorded(tmp_path, points[begin : begin + 4 // processes])
    stored = Ledger(tmp_path)
    for seconds, number in ((100, 1), (160, 1), (199, 1), (200, 3), (249, 3), (250, 4)):
        assert stored.at(committed_at=seconds * 1_000_000).commit == number
    assert [found.time.timestamp() for found in stored.points()] == [100, 200, 200, 250]


def test_lines_of_older_releases_whose_times_go_back_are_read_with_rising_times(tmp_path: Path) -> None:
    recorded(tmp_path, [timed(1, 100), timed(2, 200), timed(3, 201)])
    (path,) = (tmp_path / ledger.FOLDER).iterdir()
    lines = [line.partition(b" ")[2].replace(b"201000000", b"150000000") for line in path.read_bytes().splitlines()]
    path.write_bytes(b"".join(b"%08x %s\n" % (zlib.crc32(text), text) for text in lines))
    stored = Ledger(tmp_path)
    assert stored.at(committed_at=160_000_000).commit == 1
    assert stored.at(committed_at=200_000_000).commit == 3
    stored.record(timed(4, 160))
    assert [stored.at(committed_at=seconds * 1_000_000).commit for seconds in (199, 200)] == [1, 4]


def test_our_own_clock_counts_only_if_no_source_time_is_known(tmp_path: Path) -> None:
    begun = time.time_ns() // 1000
    (bare,) = recorded(tmp_path / "bare", [timed(1, 0)]).points()
    assert begun <= bare.committed_at <= time.time_ns() // 1000
    assert [found.committed_at for found in recorded(tmp_path, [timed(1, 300), timed(2, 0)]).points()] == [
        300_000_000
    ] * 2


def test_an_empty_ledger_and_a_position_before_the_first_point_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the log has no consistent point yet"):
        Ledger(tmp_path).at()
    with pytest.raises(ConfigError, match="the first consistent point is later") as refused:
        recorded(tmp_path, POINTS).at(position=Lsn(9))
    assert "1970-01-01T00:00:01" in refused.value.headline


def test_a_point_equal_to_the_last_one_is_not_recorded(tmp_path: Path) -> None:
    stored = recorded(tmp_path, [point(1, a=0), point(2, a=0), point(3, a=1)])
    assert [item.commit for item in stored.points()] == [1, 3]


def test_a_torn_or_damaged_line_ends_its_file_and_a_new_process_begins_another(tmp_path: Path) -> None:
    recorded(tmp_path, POINTS)
    (path,) = (tmp_path / "ledger").iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    assert list(Ledger(tmp_path).points()) == POINTS[:-1]
    path.write_bytes(whole.replace(b'"commit": 5', b'"commit": 4'))
    assert list(Ledger(tmp_path).points()) == POINTS[:2]
    recorded(tmp_path, [point(20, a=9)])
    assert Ledger(tmp_path).at() == point(20, a=9)


def test_old_points_are_removed_and_a_ledger_that_cannot_be_written_raises_nothing(tmp_path: Path) -> None:
    recorded(tmp_path, POINTS)
    (path,) = (tmp_path / "ledger").iterdir()
    old = time.time() - KEPT_SECONDS - 60
    os.utime(path, (old, old))
    assert [item.commit for item in recorded(tmp_path, [point(20, a=9)]).points()] == [20]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "ledger").write_text("a file where the folder should be")
    recorded(tmp_path / "other", POINTS)


MISSED = [
    point(1, {"b": BUSY}, a=0), point(2, {"b": FAILED}, a=1), point(3, {"b": FAILED}, a=2), point(4, a=3, b=1),
    point(5, {"a": BUSY, "dotted": BUSY}, b=2), point(6, {"a": BUSY}, b=3, dotted=1),
]  # fmt: skip


@pytest.mark.parametrize("per_file", [1, 2, 1000])
def test_why_a_table_is_missing_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, per_file: int) -> None:
    monkeypatch.setattr(ledger, "POINTS_MAX", per_file)
    assert list(recorded(tmp_path, MISSED).points()) == MISSED


def test_a_point_that_differs_only_in_why_a_table_is_missing_is_recorded(tmp_path: Path) -> None:
    stored = recorded(tmp_path, [point(1, {"b": BUSY}, a=0), point(2, {"b": BUSY}, a=0), point(3, {"b": FAILED}, a=0)])
    assert [item.commit for item in stored.points()] == [1, 3]


@pytest.mark.parametrize("per_file", [1, 2, 1000])
def test_a_table_that_is_temporarily_missing_is_found_in_a_point_shortly_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, per_file: int
) -> None:
    monkeypatch.setattr(ledger, "POINTS_MAX", per_file)
    stored = recorded(tmp_path, MISSED)
    assert stored.at() == MISSED[3]
    assert stored.at(position=Lsn(50)) == MISSED[3]
    assert stored.at(position=Lsn(30)) == MISSED[2], "a failed table does not hold back the others"
    assert stored.at(position=Lsn(10)) == MISSED[0], "no earlier point is better"


def test_an_earlier_point_that_lacks_the_same_table_is_not_preferred(tmp_path: Path) -> None:
    loading = Absence(state="seeding", why="it is being loaded")
    stored = recorded(tmp_path, [point(1, {"b": loading}, a=0), point(2, {"b": BUSY}, a=1)])
    assert stored.at().commit == 2


def test_an_earlier_point_that_lacks_another_table_is_not_preferred(tmp_path: Path) -> None:
    stored = recorded(tmp_path, [point(1, {"a": FAILED}, b=0), point(2, {"b": BUSY}, a=1)])
    assert stored.at().commit == 2


def test_only_points_shortly_before_are_searched_for_a_missing_table(tmp_path: Path) -> None:
    stored = recorded(tmp_path, [point(1, a=0, b=0), *(point(n, {"b": BUSY}, a=n) for n in range(2, NEAR_POINTS + 5))])
    assert stored.at(committed_at=NEAR_POINTS * 1_000_000).commit == 1
    assert stored.at().commit == NEAR_POINTS + 4


def test_points_of_older_releases_without_missing_tables_are_read(tmp_path: Path) -> None:
    (tmp_path / "ledger").mkdir()
    text = b'{"commit": 7, "position": "0/46", "committed_at": 7000000, "tables": [["public", "a", 3]], "gone": []}'
    line = b"%08x %s\n" % (zlib.crc32(text), text)
    (tmp_path / "ledger" / f"{7:020d}-{1:020d}.jsonl").write_bytes(line)
    assert Ledger(tmp_path).at() == point(7, a=3)


def test_asking_a_point_for_a_missing_table_says_why_it_is_missing() -> None:
    found = TablesAt({}, MISSED[1])
    with pytest.raises(ConfigError, match="no version at this point") as refused:
        found["public.b"]
    assert "value-unfit" in refused.value.headline
    with pytest.raises(KeyError):
        found["public.c"]
    assert "public.b" not in found


TWINS = TableId("a.b", "c"), TableId("a", "b.c")


@pytest.mark.parametrize("missing", [(), TWINS[:1]], ids=["both there", "one missing"])
def test_an_ambiguous_table_name_is_refused_unless_a_table_is_chosen(missing: tuple[TableId, ...]) -> None:
    """Otherwise one table would silently replace the other."""
    versions = {table: 7 for table in (A, *TWINS) if table not in missing}
    alike = replace(point(1), versions=versions, missing=dict.fromkeys(missing, FAILED))
    with pytest.raises(ConfigError, match=r"`a\.b\.c` names two tables") as refused:
        select_tables(alike, None)
    assert 'TableId("a", "b.c") and TableId("a.b", "c")' in refused.value.headline
    with pytest.raises(ConfigError, match="names two tables"):
        select_tables(alike, TWINS)
    for one in TWINS:
        only = select_tables(alike, [one, A])
        assert {*only.versions, *only.missing} == {one, A}


def test_a_table_that_a_point_does_not_have_cannot_be_chosen() -> None:
    assert select_tables(MISSED[1], None) == MISSED[1]
    assert select_tables(MISSED[1], [B]) == replace(MISSED[1], versions={})
    with pytest.raises(ConfigError, match="the point has no such table") as refused:
        select_tables(MISSED[1], [B, DOTTED])
    assert 'TableId("my.schema", "x.y")' in refused.value.headline


def test_a_table_is_chosen_by_its_name_as_well() -> None:
    assert (
        select_tables(MISSED[1], ["public.b"]) == select_tables(MISSED[1], "public.b") == select_tables(MISSED[1], [B])
    )
    with pytest.raises(ConfigError, match="the point has no such table") as refused:
        select_tables(MISSED[1], ["public.b", "public.nothing"])
    assert refused.value.fields["tables"] == "public.nothing"
    alike = replace(point(1), versions=dict.fromkeys((A, *TWINS), 7))
    with pytest.raises(ConfigError, match=r"`a\.b\.c` names two tables"):
        select_tables(alike, ["a.b.c"])


@pytest.mark.parametrize("tables", [5, [5], [B, None], [b"public.b"]], ids=ascii)
def test_a_value_that_is_not_a_table_cannot_be_chosen(tables: Any) -> None:
    with pytest.raises(ConfigError, match="`tables` does not name tables") as refused:
        select_tables(MISSED[1], tables)
    assert "`TableId`" in refused.value.hint


def test_a_single_table_need_not_be_in_a_list() -> None:
    assert select_tables(MISSED[1], B) == select_tables(MISSED[1], [B])
