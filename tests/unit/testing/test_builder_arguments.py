"""Builders of test data refuse invalid arguments at once, with what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from tailrace.capture.memory.source import MemoryCapture, batch_of
from tailrace.errors import ConfigError
from tailrace.model.change import Operation
from tailrace.model.schema import Column, Identity, TableId, TableSchema
from tailrace.state.checkpoint_stores import MemoryCheckpointStore
from tailrace.testing.changes import changes, insert, table, update
from tailrace.testing.faults import FaultyStore, delay, fail, faulty_source, slow
from tailrace.testing.scripted_source import Behind, Break, Quiet, ScriptedSource, Transaction

ODD: Any = 3
"""A value that no type checker has seen."""
TEXT: Any = "x"
ORDERS = table("public.orders", id=pa.int64(), status=pa.string())
ID = Column(name="id", source_type="bigint", type=pa.int64())


def shape(*columns: Column, key: tuple[str, ...] = ("id",)) -> TableSchema:
    return TableSchema(table=ORDERS.table, relation=1, columns=columns, key=key, identity=Identity.KEY)


@pytest.mark.parametrize(("make", "said"), [
    (lambda: TableId(ODD, ODD), "name of a table is invalid"),
    (lambda: Column(name="id", source_type="bigint", type=TEXT), "`type` is not a `DataType`"),
    (lambda: shape(ID, ID), "two columns of one name"),
    (lambda: batch_of(ODD), "`schema` is not a `TableSchema`"),
    (lambda: batch_of(ORDERS, ODD), "not a pair of an operation and values"),
    (lambda: batch_of(ORDERS, (TEXT, {"id": 1})), "not a pair of an operation and values"),
    (lambda: batch_of(ORDERS, (Operation.INSERT, {"id": 1, "zap": 2})), "no such column .*zap"),
    (lambda: batch_of(ORDERS, (Operation.INSERT, {"id": "x"})), "not have its column's type"),
    (lambda: table("orders", id=pa.int64()), "name of a table is invalid"),
    (lambda: table(ODD), "name of a table is invalid"),
    (lambda: table("public.orders", key=("zap",), id=pa.int64()), "key names a column"),
    (lambda: table("public.orders", id=TEXT), "`type` is not a `DataType`"),
    (lambda: insert(ODD), "`values` is not a `Mapping`"),
    (lambda: update({"id": 1}, before=ODD), "`before` is not a `Mapping`"),
    (lambda: changes(ODD, insert({"id": 1})), "`schema` is not a `TableSchema`"),
    (lambda: changes(ORDERS, ODD), "`change` is not a `Change`"),
    (lambda: changes(ORDERS, insert({"id": "x"})), "not have its column's type"),
    (lambda: MemoryCapture().commit(ODD), "`batches` is not a `ChangeBatch`"),
    (lambda: MemoryCapture().quiet(-1), "`size_bytes` is too small"),
    (lambda: MemoryCapture().break_next_read(ODD), "`error` is not a `TailraceError`"),
    (lambda: MemoryCapture(chunk_rows=0), "`chunk_rows` is too small"),
    (lambda: MemoryCapture(part_rows_max=0), "`part_rows_max` is too small"),
    (lambda: Transaction(ODD), "`batches` is not a `ChangeBatch`"),
    (Transaction, "a transaction needs changes"),
    (lambda: Quiet(-1), "`bytes` is too small"),
    (lambda: Behind(TEXT), "`reads` is not a whole number"),
    (lambda: Behind(1, ODD), "step of the script is invalid"),
    (lambda: Break(ODD), "`error` is not a `TailraceError`"),
    (lambda: ScriptedSource(ODD), "step of the script is invalid"),
    (lambda: ScriptedSource().play(), "the script is at its end"),
    (lambda: fail("save", at=TEXT), "`at` is not a whole number"),
    (lambda: fail("save", times=0), "`times` is too small"),
    (lambda: fail("save", error=ODD), "`error` is not a `TailraceError`"),
    (lambda: delay("save", calls=0), "`calls` is too small"),
    (lambda: slow("save", seconds=TEXT), "`seconds` is not a number"),
    (lambda: FaultyStore(ODD, fail("save")), "`store` cannot be used as one"),
    (lambda: FaultyStore(MemoryCheckpointStore(), ODD), "`faults` is not a `InjectedFault`"),
    (lambda: faulty_source(ODD, fail("read")), "`source` cannot be used as one"),
])  # fmt: skip
def test_an_invalid_argument_is_refused_with_a_hint(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        make()
    assert raised.value.hint
