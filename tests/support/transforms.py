"""Builders for tests of transforms: a table of people, and changes to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa

from tailrace.model import change
from tailrace.model.batch import ChangeBatch
from tailrace.model.change import Operation
from tailrace.model.schema import Column, Identity, TableId, TableSchema
from tailrace.transforms.rules import KeySource, Rule, Transforms
from tailrace.transforms.transform_plan import TransformPlan

KEYS = {"OLD": "11" * 32, "NEW": "22" * 32}
"""An environment with two keys."""
PEOPLE = TableSchema(
    table=TableId("public", "people"),
    relation=41,
    key=("id",),
    identity=Identity.FULL,
    columns=(
        Column(name="id", source_type="bigint", type=pa.int64()),
        Column(name="mail", source_type="text", type=pa.string()),
        Column(name="amount", source_type="numeric(10,2)", type=pa.decimal128(10, 2)),
        Column(name="country", source_type="text", type=pa.string()),
    ),
)


def plan_of(*rules: Rule) -> TransformPlan:
    keys = {"old": KeySource(env="OLD"), "new": KeySource(env="NEW")}
    return TransformPlan(Transforms.model_validate({"rules": rules, "keys": keys}), environment=KEYS)


def person(
    number: int, mail: str | None = None, amount: str | None = None, country: str | None = None
) -> dict[str, Any]:
    return {"id": number, "mail": mail, "amount": None if amount is None else Decimal(amount), "country": country}


def changed(
    operation: Operation,
    values: Mapping[str, Any],
    *,
    before: Mapping[str, Any] | None = None,
    moved_from: Mapping[str, Any] | None = None,
    unchanged: Sequence[str] | None = None,
    unfit: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """One change, as a stored row."""
    cells = [{"column": name, "text": text} for name, text in (unfit or {}).items()] or None
    return {
        change.OP: operation.value,
        **values,
        change.BEFORE: before,
        change.MOVED_FROM: moved_from,
        change.UNCHANGED: unchanged,
        change.UNFIT: cells,
    }


def batch(*rows: Mapping[str, Any], schema: TableSchema = PEOPLE) -> ChangeBatch:
    """The changes as a batch, numbered in their order; optional columns that nobody needs are left out."""
    about = {change.TX: 1, change.COMMITTED_AT: 0}
    stored = [
        {**about, change.SEQ: at, change.POSITION: f"0/{at + 1:X}", change.TX_INDEX: at, **row}
        for at, row in enumerate(rows)
    ]
    used = {name for row in rows for name in change.OPTIONAL if row.get(name) is not None}
    fields = [field for field in schema.change_schema() if field.name not in change.OPTIONAL or field.name in used]
    return ChangeBatch(
        schema=schema,
        data=pa.RecordBatch.from_pylist(stored, pa.schema(fields)),
        moves=sum(row.get(change.MOVED_FROM) is not None for row in rows),
        unfit=sum(len(row.get(change.UNFIT) or ()) for row in rows),
        truncates=sum(row[change.OP] == Operation.TRUNCATE.value for row in rows),
    )


def only(found: Sequence[ChangeBatch]) -> list[dict[str, Any]]:
    """The rows of what must be one batch, as they would be stored."""
    assert len(found) == 1
    assert found[0].with_all_columns().schema == found[0].schema.change_schema()
    rows: list[dict[str, Any]] = found[0].data.to_pylist()
    return rows


def values(found: Sequence[ChangeBatch], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in names) for row in only(found)]
