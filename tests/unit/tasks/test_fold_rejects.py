"""What tasks do that cannot ask a table which rows it holds: they note what they took for held."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tailrace.tasks.fold_rejects import ASKED_KEYS_SUFFIX, MISSING_KEYS, DeferredKeyLookup

KEYS = pa.table({"id": pa.array([3, 1, 2], pa.int16()), "shop": ["a", "b", "c"]})


def test_keys_are_noted_and_taken_for_held(tmp_path: Path) -> None:
    noting = DeferredKeyLookup(tmp_path / "folded-aside.arrow")
    assert noting(KEYS).tolist() == [True, True, True]
    assert noting(KEYS.slice(1, 1)).tolist() == [True]
    found = [pq.read_table(file).to_pydict() for file in sorted(tmp_path.glob(f"*{ASKED_KEYS_SUFFIX}"))]
    assert found == [{"k0": [3, 1, 2], "k1": ["a", "b", "c"]}, {"k0": [1], "k1": ["b"]}]


def test_what_is_known_to_be_missing_is_not_held(tmp_path: Path) -> None:
    (tmp_path / MISSING_KEYS).mkdir()
    lost = pa.table({"k0": pa.array([1, 3], pa.int32()), "k1": ["b", "other"]})
    pq.write_table(lost, tmp_path / MISSING_KEYS / "part-0.parquet")
    assert DeferredKeyLookup(tmp_path / "folded-aside.arrow")(KEYS).tolist() == [True, False, True]
    assert not list(tmp_path.glob(f"*{ASKED_KEYS_SUFFIX}"))
