"""A table made equal to staged rows: only differing rows are written."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace import failpoints
from tailrace.errors import ForeignWrite, SchemaChanged, TableUnusable, Unsupported
from tailrace.model.position import Lsn
from tailrace.tables.fold.fold import fold
from tailrace.tables.port import AppliedPosition, WriteResult
from tailrace.tables.staging import StagedFile, stage
from tests.support import others
from tests.support.changes import KEYLESS, SHOP, changes, delete, record_batches, table_schema, update
from tests.support.engines import (
    FEATURES,
    IS_ICEBERG,
    commits_of,
    examples,
    not_spark,
    of_delta,
    open_table,
    rows_of,
    staging,
)

LOG = "a-log"
KEYED = table_schema({"v": pa.float64(), "a": pa.float64(), "b": pa.string(), "l": pa.list_(pa.string())}, ("b", "a"))
KEYS = replace(KEYED, columns=tuple(column for column in KEYED.columns if column.name in KEYED.key))


def at(seq: int) -> AppliedPosition:
    return AppliedPosition(seq=seq, commit=seq // 10, position=Lsn(seq * 16))


def row(key: int, value: Any = None) -> dict[str, Any]:
    return {"id": key, "name": None, "big": value, "n": None}


class Lake:
    """A table of several files, at 0."""

    def __init__(self, folder: Path, files: Sequence[Sequence[dict[str, Any]]], schema: Any = SHOP) -> None:
        self.path, self.schema, self._count = folder / "t", schema, 0
        self.table = open_table(self.path, LOG)
        self.table.commit_load(schema, [file for rows in files for file in self.stage(rows)], at(0))

    def stage(self, rows: Sequence[dict[str, Any]], schema: Any = None) -> tuple[StagedFile, ...]:
        self._count += 1
        used = schema or self.schema
        name, batches = f"s{self._count:03d}", record_batches(used, rows)
        return stage(staging(self.path), name, used, batches, numbered=IS_ICEBERG)

    def merge(self, rows: Sequence[dict[str, Any]], upto: int = 10, keys: Any = None) -> WriteResult:
        listed = None if keys is None else self.stage(keys, KEYS if self.schema is KEYED else ID)
        return self.table.merge_load(self.schema, self.stage(rows), at(0), at(upto), keys=listed)

    def content(self) -> list[str]:
        rows = rows_of(self.path).to_pylist()
        return sorted(str(dict(zip(self.schema.names, row.values(), strict=True))) for row in rows)

    @property
    def version(self) -> int:
        return commits_of(self.path)


ID = replace(SHOP, columns=SHOP.columns[:1])
KEEPS_FILES = IS_ICEBERG or FEATURES.deletion_vectors
"""True if a file stays though some of its rows are deleted."""
FILES = [[row(n, str(n)) for n in range(start, start + 10)] for start in range(0, 50, 10)]
ALL = [row for rows in FILES for row in rows]


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path, FILES)


def test_only_the_files_in_which_a_row_differs_are_written(lake: Lake) -> None:
    before = lake.table.files()
    wanted = [row(13, "new") if r["id"] == 13 else r for r in ALL if r["id"] != 27] + [row(77), row(78)]
    applied = lake.merge(wanted[::-1])
    assert (applied.committed, applied.applied_position, applied.upserted, applied.deleted) == (True, at(10), 3, 1)
    assert lake.content() == sorted(map(str, wanted))
    after = lake.table.files()
    assert [name for name in before if name in after] == (before if KEEPS_FILES else [before[0], before[3], before[4]])
    assert (lake.version, lake.table.applied_position(), lake.table.rows()) == (1, at(10), 51)


def test_new_rows_alone_leave_every_file_alone(lake: Lake) -> None:
    before = lake.table.files()
    assert lake.merge([*ALL, row(99)]).upserted == 1
    assert set(before) < set(lake.table.files())


def test_no_staged_rows_empty_the_table(lake: Lake) -> None:
    assert lake.merge([]).deleted == 50
    assert (lake.content(), lake.table.applied_position()) == ([], at(10))
    assert IS_ICEBERG or lake.table.files() == [], "Iceberg marks rows as deleted in their files"


def test_an_empty_table_is_filled(tmp_path: Path) -> None:
    lake = Lake(tmp_path, [])
    assert lake.merge(ALL).upserted == 50
    assert lake.content() == sorted(map(str, ALL))


def test_with_keys_the_staged_rows_are_a_part_of_the_table(lake: Lake) -> None:
    before = lake.table.files()
    staged = [row(1, "new"), row(2, "2"), row(60, "60")]
    applied = lake.merge(staged, keys=[{"id": n} for n in [*range(45), 60, 61]])
    assert (applied.upserted, applied.deleted) == (2, 5)
    assert lake.content() == sorted(map(str, [*staged, row(0, "0"), *ALL[3:45]]))
    assert set(before[1:4]) < set(lake.table.files())


def test_a_staged_row_whose_key_is_not_listed_stays(lake: Lake) -> None:
    assert lake.merge([row(1, "1"), row(2, "new")], keys=[]).deleted == 48
    assert lake.content() == sorted(map(str, [row(1, "1"), row(2, "new")]))


def test_equal_rows_make_no_commit_unless_the_position_moves(lake: Lake) -> None:
    before = lake.table.files()
    assert lake.merge(ALL, upto=0) == WriteResult(committed=False, applied_position=at(0))
    assert lake.version == 0
    assert lake.merge(ALL, upto=10) == WriteResult(committed=True, applied_position=at(10))
    assert (lake.version, lake.table.applied_position(), sorted(lake.table.files())) == (1, at(10), sorted(before))


def test_rows_may_change_while_the_position_stays(lake: Lake) -> None:
    assert lake.merge(ALL[:5], upto=0).deleted == 45
    assert (lake.table.applied_position(), lake.version, lake.table.rows()) == (at(0), 1, 5)


def test_a_repeated_merge_does_nothing(lake: Lake) -> None:
    files = lake.stage(ALL[:5])
    assert lake.table.merge_load(SHOP, files, at(0), at(10)).committed
    again = lake.table.merge_load(SHOP, files, at(0), at(10))
    assert (again, lake.version) == (WriteResult(committed=False, applied_position=at(10)), 1)


def test_staged_files_do_not_become_part_of_the_table(lake: Lake) -> None:
    files = lake.stage([row(1)])
    lake.table.merge_load(SHOP, files, at(0), at(10))
    assert files[0].path not in lake.table.files()
    assert (staging(lake.path) / files[0].path).exists()


@not_spark  # Spark's merge cannot remove one of two equal rows
def test_a_duplicate_row_in_the_table_is_removed(lake: Lake) -> None:
    lake.table.commit_load(SHOP, [*lake.stage(ALL), *lake.stage([ALL[3]]), *lake.stage([ALL[4], ALL[4]])], at(0))
    lake.merge(ALL)
    assert lake.content() == sorted(map(str, ALL))


def test_merged_rows_are_compared_like_any_others(lake: Lake) -> None:
    folded = fold(SHOP, changes(SHOP, update(1, big="x"), update(2, n=5, unchanged=("big", "name")), delete(3)))
    lake.table.apply(SHOP, folded, at(0), at(5))
    expected = lake.content()
    rows = rows_of(lake.path).to_pylist()
    assert not lake.table.merge_load(SHOP, lake.stage(rows), at(5), at(5)).committed
    applied = lake.table.merge_load(SHOP, lake.stage(ALL), at(5), at(6))
    assert (applied.upserted, applied.deleted) == (3, 0)
    assert lake.content() == sorted(map(str, ALL)) != expected


def test_a_table_ahead_of_the_rows_moves_back_to_their_position_and_applies_again(lake: Lake) -> None:
    changed = fold(SHOP, changes(SHOP, update(3, big="new", name=None, n=None), first=11))
    lake.table.apply(SHOP, changed, at(0), at(20))
    staged = lake.stage([*ALL, row(99)])
    assert lake.table.merge_load(SHOP, staged, at(20), at(10)).committed
    assert (lake.table.applied_position(), lake.content()) == (at(10), sorted(map(str, [*ALL, row(99)])))
    for upto in (15, 20):
        lake.table.apply(SHOP, changed, at(10 if upto == 15 else 15), at(upto))
        assert lake.table.applied_position() == at(upto)
    assert str(row(3, "new")) in lake.content()


@of_delta("it reads Delta's log")
def test_the_commit_names_removed_files_and_has_the_position(lake: Lake) -> None:
    lake.merge(ALL[:45])
    lines = (lake.path / "_delta_log" / f"{1:020d}.json").read_text().splitlines()
    actions = [json.loads(line) for line in lines]
    (removed,) = [action["remove"] for action in actions if "remove" in action]
    assert (removed["path"], removed["dataChange"], removed["size"] > 0) == ("part-s005-000.parquet", True, True)
    assert (lake.table.version(), lake.table.applied_position()) == (1, at(10))


# --- refusing ----------------------------------------------------------------------------------------------


def test_a_table_at_another_position_is_refused(lake: Lake) -> None:
    with pytest.raises(ForeignWrite, match="starts from"):
        lake.table.merge_load(SHOP, lake.stage(ALL[:1]), at(5), at(10))
    assert lake.version == 0


def test_other_columns_and_tables_without_a_key_are_refused(lake: Lake, tmp_path: Path) -> None:
    other = table_schema({"id": pa.int64()})
    with pytest.raises(SchemaChanged):
        lake.table.merge_load(other, [], at(0), at(10))
    with pytest.raises(Unsupported):
        Lake(tmp_path / "k", [], KEYLESS).merge([])
    with pytest.raises(TableUnusable, match="no table here"):
        open_table(tmp_path / "new", LOG).merge_load(SHOP, [], at(0), at(10))


def test_a_concurrent_commit_fails_ours_and_leaves_no_strays(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    files = lake.stage(ALL[:5])
    present = set(lake.path.rglob("*.parquet"))

    def hit(name: str) -> None:
        monkeypatch.undo()
        others.append(lake.path)

    monkeypatch.setattr(failpoints, "hit", hit)
    with pytest.raises(ForeignWrite, match="at the same time"):
        lake.table.merge_load(SHOP, files, at(0), at(10))
    assert (lake.version, lake.content()) == (1, sorted(2 * [str(row) for row in ALL]))
    # Uncommitted files of an Iceberg table are left to the removal of orphans.
    assert IS_ICEBERG or len(set(lake.path.rglob("*.parquet")) - present) == 1


def test_a_missing_or_damaged_staged_file_is_an_error_and_commits_nothing(lake: Lake) -> None:
    missing, damaged = lake.stage(ALL[:5]), lake.stage(ALL[:5])
    (staging(lake.path) / missing[0].path).unlink()
    (staging(lake.path) / damaged[0].path).write_bytes(b"PAR1 nonsense PAR1")
    for files in (missing, damaged):
        with pytest.raises(TableUnusable):
            lake.table.merge_load(SHOP, files, at(0), at(10))
    assert lake.version == 0


# --- against a simple model --------------------------------------------------------------------------------

KEY = st.tuples(st.sampled_from([0.0, -0.0, 1.0, math.inf]), st.sampled_from(["", "é", "x" * 40]))
VALUE = st.tuples(st.sampled_from([None, 0.0, -0.0, math.nan]), st.sampled_from([None, [], [None], ["a"]]))


Rows = dict[Any, dict[str, Any]]


def by_key(drawn: dict[Any, Any]) -> Rows:
    """By key; the two zeros are one."""
    return {key: {"v": value[0], "a": key[0], "b": key[1], "l": value[1]} for key, value in drawn.items()}


ROWS = st.dictionaries(KEY, VALUE, max_size=5).map(by_key)


@pytest.mark.slow
@given(st.lists(ROWS, max_size=4), ROWS, st.none() | st.lists(KEY, max_size=8), st.integers(0, 4))
@settings(max_examples=examples(60), deadline=None)
def test_any_table_becomes_equal_to_the_staged_rows(drawn: list[Rows], staged: Rows, keys: Any, other: int) -> None:
    table: Rows = {}
    files: list[Rows] = []
    for part in drawn:
        files.append({key: found for key, found in part.items() if key not in table})
        table |= files[-1]
    # Most rows of a real table do not differ.
    staged = {key: table.get(key, found) if n % 5 >= other else found for n, (key, found) in enumerate(staged.items())}
    stay = {key: found for key, found in table.items() if key not in staged and key in (keys or ())}
    wanted = stay | staged
    with tempfile.TemporaryDirectory() as folder:
        lake = Lake(Path(folder), [list(part.values()) for part in files], KEYED)
        names = sorted(lake.table.files())
        listed = None if keys is None else [{"a": a, "b": b} for a, b in keys]
        applied = lake.merge(list(staged.values()), keys=listed)
        assert lake.content() == sorted(map(str, wanted.values()))
        assert applied.deleted == len(table.keys() - wanted.keys())
        assert applied.upserted == len([key for key in staged if str(table.get(key)) != str(staged[key])])
        for name, part in zip(names, filter(None, files), strict=True):
            same = [str(wanted.get(key)) == str(found) for key, found in part.items()]
            assert (IS_ICEBERG or all(same) or (KEEPS_FILES and any(same))) == (name in lake.table.files())
