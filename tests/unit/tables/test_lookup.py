"""Rows of a real table that changes build on, where the source is asked for what the table cannot be trusted with."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tailrace.model.position import Lsn
from tailrace.tables.base import Cursor
from tailrace.tables.delta import DeltaRsTable
from tailrace.tables.formed import fold_into
from tailrace.tables.forms import PLAIN, Form
from tests.support.changes import SHOP, changes, delete, move, record_batches

LOADED, THEN = Cursor(seq=0, commit=0, position=Lsn(0)), Cursor(seq=10, commit=1, position=Lsn(10))


@pytest.mark.parametrize(("form", "left"), [(PLAIN, []), (Form(soft_delete=True), [(2, "large", True)])], ids=str)
def test_a_row_that_a_chunk_saw_after_it_moved_goes_when_the_source_has_it_no_more(
    tmp_path: Path, form: Form, left: list[tuple[int, str, bool]]
) -> None:
    table = DeltaRsTable(tmp_path / "t", "log", form)
    table.load(SHOP, record_batches(SHOP, [{"id": 2, "big": "large"}]), LOADED)
    folded = fold_into(form, SHOP, changes(SHOP, *move(1, 2, unchanged=("big",)), delete(2)))

    def source_has_none(_keys: pa.Table) -> pa.Table:
        return pa.schema(SHOP.row_fields()).empty_table()

    table.apply(SHOP, folded, LOADED, THEN, reread=source_has_none, touch=True)
    found = [row for file in table.files() for row in pq.read_table(tmp_path / "t" / file).to_pylist()]
    assert [(row["id"], row["big"], row["_deleted"]) for row in found] == left
