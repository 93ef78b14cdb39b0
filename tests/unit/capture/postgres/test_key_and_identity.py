"""A table's key is taken from the message, from the current catalogue, or from what was known before."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest

from tailrace.capture.postgres.catalogue import AnnouncedTable, CurrentIdentity, key_and_identity
from tailrace.model.schema import Column, Identity, TableId, TableSchema

TABLE = TableId("public", "items")
TOLD = AnnouncedTable(table=TABLE, oid=7, replica="d", columns=[("id", 23, -1), ("a", 23, -1)], flagged=("id",))
FULL = replace(TOLD, replica="f", flagged=())
NOW = CurrentIdentity(kind="r", usable=True, key_is_sent=True, primary=("id",), replica=())
GONE = CurrentIdentity(kind=None, usable=True, key_is_sent=True, primary=(), replica=())


def known(*names: str, key: tuple[str, ...] = ("id",), identity: Identity = Identity.KEY) -> TableSchema:
    columns = tuple(Column(name=name, source_type="integer", type=pa.int32()) for name in names)
    return TableSchema(table=TABLE, relation=7, columns=columns, key=key, identity=identity)


def test_a_flagged_key_is_the_key() -> None:
    assert key_and_identity(TOLD, NOW, None, shown=True) == (("id",), Identity.KEY)


@pytest.mark.parametrize("shown", [True, False])
def test_a_later_wider_key_does_not_apply_to_earlier_rows(shown: bool) -> None:
    wider = replace(NOW, primary=("id", "a"))
    assert key_and_identity(TOLD, wider, None, shown=shown) == (("id",), Identity.KEY)


def test_a_key_that_a_column_list_cuts_is_not_a_key() -> None:
    wider = replace(NOW, primary=("id", "b"))
    assert key_and_identity(TOLD, wider, None, shown=True)[0] == ()


def test_a_wider_key_with_a_later_column_does_not_apply_to_earlier_rows() -> None:
    wider = replace(NOW, primary=("id", "b"))
    assert key_and_identity(TOLD, wider, known("id", "a"), shown=False) == (("id",), Identity.KEY)


def test_a_flagged_key_proves_that_there_was_an_identity() -> None:
    dropped = replace(NOW, usable=False, primary=())
    assert key_and_identity(TOLD, dropped, None, shown=True) == (("id",), Identity.KEY)


def test_all_partitions_of_a_partitioned_table_must_agree() -> None:
    parts = replace(NOW, kind="p", usable=False)
    assert key_and_identity(TOLD, parts, None, shown=True) == (("id",), Identity.NONE)


def test_the_key_under_full_is_the_catalogues_while_it_shows_the_table() -> None:
    assert key_and_identity(FULL, NOW, None, shown=True) == (("id",), Identity.FULL)
    assert key_and_identity(FULL, replace(NOW, primary=()), None, shown=True) == ((), Identity.FULL)


def test_the_key_under_full_is_what_it_was_once_the_catalogue_shows_another_table() -> None:
    other = replace(NOW, primary=("a",))
    before = known("id", "a", identity=Identity.FULL)
    assert key_and_identity(FULL, other, before, shown=False) == (("id",), Identity.FULL)


def test_a_dropped_table_keeps_the_key_it_had() -> None:
    assert key_and_identity(FULL, GONE, known("id", identity=Identity.FULL), shown=False)[0] == ("id",)
    assert key_and_identity(FULL, GONE, known("x", key=("x",)), shown=False)[0] == ()


def test_a_key_with_a_column_that_is_never_sent_is_not_a_key() -> None:
    assert key_and_identity(FULL, replace(NOW, key_is_sent=False), None, shown=True)[0] == ()


def test_without_an_identity_no_old_rows_are_sent() -> None:
    nothing = replace(TOLD, replica="n", flagged=())
    assert key_and_identity(nothing, NOW, None, shown=True) == (("id",), Identity.NONE)
