"""The write that a change means for a mirror, and its JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from tailrace.errors import ConfigError
from tailrace.model.batch import ChangeBatch
from tailrace.model.change import Operation
from tailrace.model.event import ENVELOPE, Delete, Event, Merge, Nothing, Replace, RowWrite, Truncate
from tailrace.model.event_json import UNAVAILABLE, to_debezium, to_debezium_line, to_json, to_json_line
from tailrace.model.schema import Column, Identity, TableId, TableSchema
from tailrace.model.system_streams import MESSAGE_STREAM
from tailrace.testing import changes as made
from tests.support.changes import KEYLESS, SHOP, Change, changes, delete, insert, move, table_schema, truncate, update
from tests.support.windows import batch


def events(schema: TableSchema, *rows: Change) -> list[Event]:
    return list(batch(schema, *rows).events())


def written(schema: TableSchema, *rows: Change) -> list[RowWrite]:
    return [event.row_write() for event in events(schema, *rows)]


ROW = {"id": 1, "name": "a", "big": "b", "n": 3}


def test_a_whole_row_replaces_the_old_one() -> None:
    given = insert(1, name="a", big="b", n=3), update(1, name="a", big="b", n=3)
    assert written(SHOP, *given) == [Replace(key={"id": 1}, row=ROW)] * 2


def test_an_unsent_value_is_merged_and_never_null() -> None:
    (todo,) = written(SHOP, update(1, name="a", n=3, unchanged=("big",)))
    assert todo == Merge(key={"id": 1}, columns={"id": 1, "name": "a", "n": 3}, unchanged=("big",), base={"id": 1})


def test_a_key_that_changed_is_a_delete_and_a_row() -> None:
    gone, come = written(SHOP, *move(1, 2, name="a", big="b", n=3))
    assert gone == Delete(key={"id": 1})
    assert come == Replace(key={"id": 2}, row=ROW | {"id": 2})


def test_an_old_row_that_the_new_one_builds_on_is_not_deleted_before() -> None:
    gone, come = written(SHOP, *move(1, 2, name="a", n=3, unchanged=("big",)))
    assert isinstance(gone, Nothing)
    assert "continues under another key" in gone.why
    assert come == Merge(key={"id": 2}, columns={"id": 2, "name": "a", "n": 3}, unchanged=("big",), base={"id": 1})


def test_a_delete_before_a_moved_row_of_another_key_is_a_delete() -> None:
    _, come = move(1, 2, name="a", n=3, unchanged=("big",))
    assert written(SHOP, delete(7), come)[0] == Delete(key={"id": 7})


def test_an_old_row_is_deleted_if_the_new_one_cannot_be_written() -> None:
    """Then no later write would remove it."""
    gone, come = move(1, 2, unchanged=("big",))
    assert written(SHOP, gone, replace(come, unfit=("n",)))[0] == Delete(key={"id": 1})


def test_a_delete_and_a_truncate() -> None:
    assert written(SHOP, delete(1), truncate()) == [Delete(key={"id": 1}), Truncate()]


def test_a_keyless_table_is_a_bag_of_rows() -> None:
    one: dict[str, Any] = {"a": 1, "b": "x"}
    two: dict[str, Any] = {"a": 2, "b": "y"}
    added, changed, gone = written(KEYLESS, insert({}, **one), update({}, before=one, **two), delete({}, **two))
    assert added == Replace(key=None, row=one)
    assert changed == Replace(key=None, row=two, old=one)
    assert gone == Delete(key=None, old=two)


@pytest.mark.parametrize(
    ("schema", "row", "why"),
    [
        (SHOP, insert(1, unfit=("n",)), "does not fit the type of its column: n"),
        (KEYLESS, update({}, a=1), "did not send the old row"),
        (KEYLESS, update({}, a=1, unchanged=("b",)), "did not send the whole row"),
        (replace(KEYLESS, identity=Identity.NONE), delete({}), "did not send the old row"),
        (MESSAGE_STREAM, Change(op="message", values={"prefix": "p"}), "a message concerns no row"),
    ],
)  # fmt: skip
def test_a_change_that_cannot_be_written_has_the_reason(schema: TableSchema, row: Change, why: str) -> None:
    (todo,) = written(schema, row)
    assert isinstance(todo, Nothing)
    assert why in todo.why
    assert "SECRET" not in todo.why


def test_an_event_has_the_row_before_and_after_its_key_and_its_position() -> None:
    (event,) = events(KEYLESS, update({}, before={"a": 1, "b": "x"}, a=2, b="y"))
    assert (event.before, event.after, event.key) == ({"a": 1, "b": "x"}, {"a": 2, "b": "y"}, None)
    assert (event.seq, event.position, event.transaction, event.tx_index, event.version) == (0, "0/0", 0, 0, ENVELOPE)
    (gone,) = events(SHOP, delete(7))
    assert (gone.after, gone.key, gone.operation) == (None, {"id": 7}, Operation.DELETE)


FULL = replace(SHOP, identity=Identity.FULL)


@pytest.mark.parametrize(
    ("schema", "row", "sent"),
    [
        (KEYLESS, delete({}, a=1, b="x"), {"a": 1, "b": "x"}),
        (KEYLESS, delete({}), {"a": None, "b": None}),
        (FULL, delete(1, name="a", big=None, n=3), ROW | {"big": None}),
        (SHOP, delete(1), {"id": 1}),
    ],
    ids=["no key", "no key, all of it null", "a key, the whole row sent", "the key sent"],
)
def test_the_sent_columns_of_a_deleted_row_are_returned(schema: TableSchema, row: Change, sent: dict[str, Any]) -> None:
    (event,) = events(schema, row)
    assert event.before == to_json(event)["before"] == to_debezium(event)["before"] == sent
    assert event.after is to_debezium(event)["after"] is None


def test_a_row_of_nulls_is_removed_from_a_keyless_table() -> None:
    assert written(KEYLESS, delete({})) == [Delete(key=None, old={"a": None, "b": None})]


def test_the_old_row_of_a_changed_key_is_returned_like_a_deleted_one() -> None:
    gone, come = events(FULL, delete(1, name="a", big="b", n=3), move(1, 2, name="a", big="b", n=3)[1])
    assert (gone.before, come.before, come.moved_from) == (ROW, None, {"id": 1})


def test_a_column_with_a_reserved_name_has_its_own_name_in_an_event() -> None:
    column = Column(name="_op", source_type="text", type=pa.string())
    schema = replace(SHOP, columns=(*SHOP.columns, column))
    (event,) = events(schema, update(1, before={"id": 1, "_op": "old"}, _op="mine"))
    assert event.values["_op"] == "mine"
    assert event.before is not None
    assert event.before["_op"] == "old"


TYPES: dict[str, tuple[pa.DataType, Any, Any, Any]] = {
    "small": (pa.int64(), 5, 5, 5),
    "large": (pa.int64(), 2**60, str(2**60), 2**60),
    "yes": (pa.bool_(), True, True, True),
    "ratio": (pa.float64(), 0.5, 0.5, 0.5),
    "none": (pa.float64(), float("nan"), "NaN", "NaN"),
    "endless": (pa.float64(), float("-inf"), "-Infinity", "-Infinity"),
    "price": (pa.decimal128(12, 2), Decimal("10.50"), "10.50", "10.50"),
    "raw": (pa.binary(), b"\x00\xff", "AP8=", "AP8="),
    "day": (pa.date32(), date(1970, 1, 11), "1970-01-11", 10),
    "hour": (pa.time64("us"), time(0, 0, 1), "00:00:01", 1_000_000),
    "local": (pa.timestamp("us"), datetime(1970, 1, 1, 0, 0, 2), "1970-01-01T00:00:02", 2_000_000),
    "zoned": (
        pa.timestamp("us", "UTC"), datetime(1970, 1, 1, tzinfo=UTC), "1970-01-01T00:00:00+00:00",
        "1970-01-01T00:00:00Z",
    ),
    "many": (pa.list_(pa.int32()), [1, None], [1, None], [1, None]),
    "word": (pa.string(), "é\n", "é\n", "é\n"),
    "nothing": (pa.string(), None, None, None),
}  # fmt: skip


def test_every_type_is_written_to_json_without_loss() -> None:
    schema = TableSchema(
        table=TableId("a.b", "c"),
        relation=1,
        key=("small",),
        identity=Identity.KEY,
        columns=tuple(Column(name=name, source_type="", type=kind) for name, (kind, *_) in TYPES.items()),
    )
    values = {name: value for name, (_, value, _, _) in TYPES.items()}
    (event,) = events(schema, Change(op="insert", values=values))
    assert to_json(event)["after"] == {name: ours for name, (_, _, ours, _) in TYPES.items()}
    assert to_debezium(event)["after"] == {name: theirs for name, (_, _, _, theirs) in TYPES.items()}
    assert json.loads(to_json_line(event)) == to_json(event)
    assert "\n" not in to_json_line(event) + to_debezium_line(event)


def test_a_date_outside_pythons_calendar_is_its_text() -> None:
    schema = table_schema({"id": pa.int64(), "day": pa.date32(), "at": pa.timestamp("us")})
    (data,) = changes(schema, insert(1), insert(2, day=date(2024, 2, 29))).combine_chunks().to_batches()
    far = pa.array([3_700_000, None], pa.int32()).view(pa.date32())
    data = data.set_column(data.schema.get_field_index("day"), "day", far)
    first, second = ChangeBatch(schema=schema, data=data).events()
    assert (first.values["day"], second.values["day"]) == ("12100-04-04", None)
    assert to_json(first)["after"]["day"] == to_debezium(first)["after"]["day"] == "12100-04-04"


def test_a_date_outside_pythons_calendar_is_text_in_an_old_row_a_key_and_a_list() -> None:
    def made(day: pa.DataType) -> TableSchema:
        columns = {"id": day, "days": pa.list_(day), "n": pa.int64()}
        return table_schema(columns, key=("id",), identity=Identity.FULL)

    far, near = 3_700_000, 0
    (data,) = (
        changes(
            made(pa.int32()),
            update(near, before={"id": near, "days": [far, None], "n": 1}),
            *move(far, far + 1, unchanged=("n",)),
            update(near, days=[]),
        )
        .combine_chunks()
        .to_batches()
    )
    dated = made(pa.date32())
    fields = pa.schema([dated.change_schema().field(name) for name in data.schema.names])
    first, gone, come, last = ChangeBatch(schema=dated, data=data.cast(fields)).events()
    assert first.before == {"id": date(1970, 1, 1), "days": ["12100-04-04", None], "n": 1}
    assert (gone.kept_for, come.moved_from) == ({"id": "12100-04-05"}, {"id": "12100-04-04"})
    assert (first.values["days"], last.values["days"], come.before) == (None, [], None)


def test_in_our_own_format_absent_is_not_null() -> None:
    (event,) = events(SHOP, update(1, name=None, n=3, unchanged=("big",)))
    found = to_json(event)
    assert found["after"] == {"id": 1, "name": None, "n": 3}
    assert (found["unchanged"], found["key"], found["v"]) == (["big"], {"id": 1}, ENVELOPE)
    assert "before" not in found


def test_a_line_of_an_old_row_says_that_the_next_one_needs_it() -> None:
    gone, come = (to_json(event) for event in events(SHOP, *move(1, 2, unchanged=("big",))))
    assert (gone["op"], gone["kept_for"]) == ("delete", {"id": 2})
    assert (come["moved_from"], come["unchanged"]) == ({"id": 1}, ["big"])


def test_lesson_11_tables_whose_names_read_alike_stay_apart_in_json() -> None:
    one, other = (replace(SHOP, table=TableId(*names)) for names in (("a.b", "c"), ("a", "b.c")))
    (first,), (second,) = events(one, insert(1)), events(other, insert(1))
    assert first.table == second.table == "a.b.c"
    assert [(to_json(event)["schema"], to_json(event)["name"]) for event in (first, second)] == [
        ("a.b", "c"),
        ("a", "b.c"),
    ]
    sources = [to_debezium(event, database="shop")["source"] for event in (first, second)]
    assert [(source["db"], source["schema"], source["table"]) for source in sources] == [
        ("shop", "a.b", "c"),
        ("shop", "a", "b.c"),
    ]


def test_readers_of_debezium_find_what_they_look_for() -> None:
    given = insert(1, name="a", big="b", n=3), update(1, unchanged=("big",)), delete(1), truncate()
    found = [to_debezium(event, name="shop") for event in events(SHOP, *given)]
    assert [item["op"] for item in found] == ["c", "u", "d", "t"]
    assert found[0]["before"] is None
    assert found[1]["after"]["big"] == UNAVAILABLE
    assert (found[2]["before"], found[2]["after"]) == ({"id": 1}, None)
    source = found[1]["source"]
    assert (source["schema"], source["table"], source["name"]) == ("public", "things", "shop")
    assert source["snapshot"] == "false"
    assert (source["lsn"], source["txId"]) == (1, 1)
    (read,) = events(SHOP, Change(op="read", values=ROW))
    assert (to_debezium(read)["op"], to_debezium(read)["source"]["snapshot"]) == ("r", "true")


def test_a_position_that_is_not_an_lsn_is_written_for_debezium_readers_too() -> None:
    (event,) = events(SHOP, insert(1, name="a"))
    source = to_debezium(replace(event, position="topic/7"))["source"]
    assert (source["lsn"], json.loads(source["sequence"])) == (None, ["topic/7", str(event.seq)])


@pytest.mark.parametrize("given", [None, 3, {"id": 1}, "event"], ids=str)
def test_what_is_not_an_event_is_refused(given: Any) -> None:
    for form in (to_json, to_json_line, to_debezium, to_debezium_line):
        with pytest.raises(ConfigError, match="not a `Event`") as raised:
            form(given)
        assert "batch.events()" in raised.value.hint


def test_the_names_for_debezium_readers_are_texts() -> None:
    (event,) = events(SHOP, insert(1))
    odd: dict[str, Any]
    for odd in ({"name": 3}, {"database": None}):
        with pytest.raises(ConfigError, match="not a `str`"):
            to_debezium(event, **odd)


def test_days_outside_pythons_calendar_are_texts_in_nested_values() -> None:
    far = made.table("public.far", day=pa.date32(), at=pa.timestamp("us", "UTC"), days=pa.list_(pa.date32()))
    day, moment = 3_000_000, 300_000_000_000_000_000
    row = {"day": day, "at": moment, "days": [day, None, 0]}
    given = made.changes(far, made.update(row, before=row), made.move({"day": day}, {"day": day + 1}))
    updated, deleted, moved = given.events()
    read = {"day": "10183-09-21", "at": "11476-08-15T05:20:00.000000", "days": ["10183-09-21", None, date(1970, 1, 1)]}
    assert (updated.values, updated.before) == (read, read)
    assert (deleted.key, moved.moved_from) == ({"day": "10183-09-21"}, {"day": "10183-09-21"})
    assert json.loads(to_json_line(updated))["before"]["days"] == ["10183-09-21", None, "1970-01-01"]
