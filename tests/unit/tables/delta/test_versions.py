"""A table's version is listed completely, or refused."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tailrace.errors import TableUnusable
from tailrace.tables.delta.versions import files_at
from tests.support.changes import SHOP, insert, truncate
from tests.support.mirrors import ROWS, Mirror


@pytest.mark.parametrize("name", ["t", "100%25[x]"])
def test_a_version_is_its_columns_and_its_files(tmp_path: Path, name: str) -> None:
    path = tmp_path / "lake" / "public" / name
    mirror = Mirror(path, rows=ROWS)
    mirror.apply(truncate())
    columns, files, partitions = files_at(path, 0)
    assert columns.names == SHOP.names
    assert sum(pq.read_metadata(file).num_rows for file in files) == len(ROWS)
    assert partitions.num_columns == 0
    assert files_at(path, 1)[:2] == (columns, [])


def test_a_missing_version_or_one_with_missing_files_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lake" / "public" / "t"
    with pytest.raises(TableUnusable, match="no longer exists"):
        files_at(path, 0)
    mirror = Mirror(path, rows=ROWS)
    mirror.apply(insert(7))
    with pytest.raises(TableUnusable, match="no longer has this version"):
        files_at(path, 9)
    files_at(path, 0).files[0].unlink()
    with pytest.raises(TableUnusable, match="files of this version were removed"):
        files_at(path, 0)
