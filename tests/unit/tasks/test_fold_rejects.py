"""Key lookups of tasks that cannot read the table: they write the keys that they assume to exist."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tailrace.tasks.fold_rejects import ASKED_KEYS_SUFFIX, MISSING_KEYS, DeferredKeyLookup

KEYS = pa.table({"id": pa.array([3, 1, 2], pa.int16()), "shop": ["a", "b", "c"]})


def test_a_task_that_cannot_read_the_table_writes_its_keys_and_assumes_that_they_exist(tmp_path: Path) -> None:
    lookup = DeferredKeyLookup(tmp_path / "folded-rejects.arrow")
    assert lookup(KEYS).tolist() == [True, True, True]
    assert lookup(KEYS.slice(1, 1)).tolist() == [True]
    written = [pq.read_table(file).to_pydict() for file in sorted(tmp_path.glob(f"*{ASKED_KEYS_SUFFIX}"))]
    assert written == [{"k0": [3, 1, 2], "k1": ["a", "b", "c"]}, {"k0": [1], "k1": ["b"]}]


def test_keys_that_a_job_found_missing_do_not_exist(tmp_path: Path) -> None:
    (tmp_path / MISSING_KEYS).mkdir()
    missing = pa.table({"k0": pa.array([1, 3], pa.int32()), "k1": ["b", "other"]})
    pq.write_table(missing, tmp_path / MISSING_KEYS / "part-0.parquet")
    assert DeferredKeyLookup(tmp_path / "folded-rejects.arrow")(KEYS).tolist() == [True, False, True]
    assert not list(tmp_path.glob(f"*{ASKED_KEYS_SUFFIX}"))
