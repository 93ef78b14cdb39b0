"""Compile every kernel in advance: `make setup` calls this, so no first change waits."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from tailrace.capture.postgres.warm import warm_kernels as warm_capture
from tailrace.deadletters.keyed import DeadLetterKeys, split_rejects
from tailrace.model import change
from tailrace.model.schema import Column, Identity, TableId, TableSchema
from tailrace.tables.fold.by_mode import fold_by_mode
from tailrace.tables.fold.fold import fold
from tailrace.tables.spec import TableMode, TableSpec
from tailrace.transforms.steps.hashes import hmac_sha256, sha256


def warm_kernels() -> None:
    """Compile everything that a capture or an apply needs."""
    warm_capture()
    columns = tuple(Column(name=name, source_type="text", type=pa.string()) for name in ("id", "large"))
    schema = TableSchema(
        table=TableId("public", "warm"), relation=1, columns=columns, key=("id",), identity=Identity.KEY
    )
    rows = [_row(1, "insert", None), _row(2, "update", ["large"])]
    folded = fold(schema, pa.Table.from_pylist(rows, schema.change_schema()))
    assert folded.rows.num_rows == 1, folded.rows.num_rows
    versions = fold_by_mode(
        TableSpec(mode=TableMode.HISTORY), schema, pa.Table.from_pylist(rows, schema.change_schema())
    )
    assert versions.rows.num_rows == 1, versions.rows.num_rows
    partial = pa.Table.from_pylist([_row(1, "update", ["large"])], schema.change_schema())
    split = split_rejects(schema, partial, DeadLetterKeys.none(schema), lambda keys: np.zeros(keys.num_rows, np.bool_))
    assert split.dead_letters.num_rows == 1, split.dead_letters.num_rows
    hidden = [*sha256(pa.array(["x"])).to_pylist(), *hmac_sha256(pa.array(["x"]), b"k").to_pylist()]
    assert [len(text) for text in hidden] == [64, 64], hidden


def _row(seq: int, operation: str, unchanged: list[str] | None) -> dict[str, object]:
    return {
        change.OP: operation,
        change.SEQ: seq,
        change.POSITION: "0/1",
        change.TX: 1,
        change.TX_INDEX: seq,
        change.COMMITTED_AT: 0,
        change.UNCHANGED: unchanged,
        "id": "1",
        "large": None if unchanged else "x",
    }
