"""The old row that a real server sends, for every replica identity, and what it leaves out of the new one."""

from __future__ import annotations

import pytest

from tailrace.model.event_json import to_debezium, to_json
from tailrace.model.mirror import Mirror
from tailrace.model.schema import Identity
from tests.support.tables import BIG, Scene

FULL = "alter table t replica identity full"


def follow(scene: Scene, *statements: str) -> None:
    """Create a table `t` with these statements, and follow it."""
    scene.run(*statements)
    scene.follow("t")


def publication_of_each_table(scene: Scene) -> set[str]:
    return scene.capture.publications_by_table()[scene.id("t")]


# --- kinds of identity -------------------------------------------------------------------------------------


def test_by_default_the_primary_key_is_the_identity(scene: Scene) -> None:
    follow(scene, "create table t (v text, id int primary key)")
    scene.run("insert into t values ('a', 1)", "update t set v = 'b'", "delete from t", "insert into t values ('c', 2)")
    told = scene.told()
    assert {(change.schema.key, change.schema.identity) for change in told} == {(("id",), Identity.KEY)}
    assert [change.event.before for change in told] == [None, None, {"id": 1}, None]
    assert told[2].values == {"v": None, "id": 1}
    assert scene.agreed(told, "t") == [{"v": "c", "id": 2}]


def test_under_full_the_whole_old_row_is_sent_and_the_key_is_read_from_the_catalogue(scene: Scene) -> None:
    follow(scene, "create table t (v text, id int primary key, w int)", FULL)
    scene.run("insert into t values ('a', 1, 7)", "update t set v = 'b'", "update t set id = 2", "delete from t")
    told = scene.told()
    assert {(change.schema.key, change.schema.identity) for change in told} == {(("id",), Identity.FULL)}
    assert [change.short for change in told] == [
        ("insert", "t", "a", 1, 7),
        ("update", "t", "b", 1, 7),
        ("delete", "t", "b", 1, 7),
        ("insert", "t", "b", 2, 7),
        ("delete", "t", "b", 2, 7),
    ]
    assert told[1].event.before == {"v": "a", "id": 1, "w": 7}
    assert told[3].event.moved_from == {"id": 1}
    for gone, row in ((told[2].event, {"v": "b", "id": 1, "w": 7}), (told[4].event, {"v": "b", "id": 2, "w": 7})):
        assert gone.before == to_json(gone)["before"] == to_debezium(gone)["before"] == row
    assert scene.agreed(told, "t") == []


def test_the_columns_of_an_index_can_be_the_identity(scene: Scene) -> None:
    follow(
        scene,
        "create table t (id int primary key, a int not null, v text, b text not null)",
        "create unique index t_ab on t (b, a) include (v)",
        "alter table t replica identity using index t_ab",
    )
    scene.run(
        "insert into t values (1, 1, 'v', 'k')",
        "update t set id = 5",
        "update t set a = 2",
        "delete from t",
        "insert into t values (2, 3, 'w', 'l')",
    )
    told = scene.told()
    assert {change.schema.key for change in told} == {("a", "b")}
    assert [change.short for change in told[:5]] == [
        ("insert", "t", 1, 1, "v", "k"),
        ("update", "t", 5, 1, "v", "k"),
        ("delete", "t", None, 1, None, "k"),
        ("insert", "t", 5, 2, "v", "k"),
        ("delete", "t", None, 2, None, "k"),
    ]
    assert told[3].event.moved_from == {"a": 1, "b": "k"}
    assert scene.agreed(told, "t") == [{"id": 2, "a": 3, "v": "w", "b": "l"}]


@pytest.mark.parametrize(
    "made",
    [
        ["create table t (id int, v text)"],
        ["create table t (id int primary key, v text)", "alter table t replica identity nothing"],
        ["create table t (id int primary key deferrable, v text)"],
        ["create table t (id int unique, v text)"],
    ],
    ids=["no key", "nothing", "deferrable", "unique"],
)
def test_without_an_identity_inserts_and_truncates_arrive_and_the_application_is_not_disturbed(
    scene: Scene, made: list[str]
) -> None:
    follow(scene, *made)
    assert publication_of_each_table(scene) == {f"{scene.name}_inserts"}
    scene.run("insert into t values (1, 'a'), (2, 'b')", "update t set v = 'x'", "delete from t where id = 1")
    told = scene.told()
    assert [change.short for change in told] == [("insert", "t", 1, "a"), ("insert", "t", 2, "b")]
    assert {change.schema.identity for change in told} == {Identity.NONE}
    assert scene.load("t") == (told[0].schema, [{"id": 2, "v": "x"}])
    scene.run("truncate t")
    assert scene.short() == [("truncate", "t")]


def test_a_deferrable_key_under_full_is_no_key(scene: Scene) -> None:
    follow(scene, "create table t (id int primary key deferrable initially deferred)", FULL)
    scene.together("insert into t values (1)", "insert into t values (1)", "update t set id = 2 where ctid = '(0,1)'")
    told = scene.told()
    assert {(change.schema.key, change.schema.identity) for change in told} == {((), Identity.FULL)}
    assert scene.agreed(told, "t") == [{"id": 1}, {"id": 2}]


def test_a_keyless_table_under_full_keeps_equal_rows_separate(scene: Scene) -> None:
    follow(scene, "create table t (a int, b text)", FULL)
    scene.run(
        "insert into t values (1, 'x'), (1, 'x'), (1, 'x'), (null, null)",
        "delete from t where ctid = '(0,2)'",
        "update t set b = 'y' where ctid = '(0,1)'",
        "update t set a = 0 where a is null",
        "insert into t default values",
        "delete from t where a is null",
    )
    told = scene.told()
    assert [change.short for change in told[4:]] == [
        ("delete", "t", 1, "x"),
        ("update", "t", 1, "y"),
        ("update", "t", 0, None),
        ("insert", "t", None, None),
        ("delete", "t", None, None),
    ]
    x, nothing = {"a": 1, "b": "x"}, {"a": None, "b": None}
    assert [change.event.before for change in told[4:]] == [x, x, nothing, None, nothing]
    assert [to_json(told[at].event)["before"] for at in (4, 8)] == [x, nothing]
    assert [to_debezium(told[at].event)["before"] for at in (4, 8)] == [x, nothing]
    mirror = Mirror()
    for change in told:
        mirror.apply(change.event.row_write())
    assert sorted(mirror.rows.values(), key=str) == [{"a": 0, "b": None}, {"a": 1, "b": "x"}, {"a": 1, "b": "y"}]
    assert scene.agreed(told, "t") == [{"a": 0, "b": None}, {"a": 1, "b": "x"}, {"a": 1, "b": "y"}]


def test_an_identity_whose_index_was_dropped_is_missing_at_the_next_start(scene: Scene) -> None:
    follow(
        scene,
        "create table t (id int primary key, a int not null unique)",
        "alter table t replica identity using index t_a_key",
    )
    assert publication_of_each_table(scene) == {scene.name}
    scene.run("alter table t drop constraint t_a_key")
    (table,) = scene.capture.tables()
    assert table.identity is Identity.NONE


# --- identity that changes ---------------------------------------------------------------------------------


def test_an_identity_that_changes_during_the_stream_holds_from_the_next_row_on(scene: Scene) -> None:
    follow(scene, "create table t (id int primary key, a int not null unique, v text)")
    scene.run(
        "insert into t values (1, 10, 'v')",
        "update t set v = 'w'",
        FULL,
        "update t set v = 'x'",
        "alter table t replica identity using index t_a_key",
        "update t set a = 11",
        "alter table t replica identity default",
        "update t set id = 2",
    )
    told = scene.told()
    assert [change.short for change in told] == [
        ("insert", "t", 1, 10, "v"),
        ("update", "t", 1, 10, "w"),
        ("update", "t", 1, 10, "x"),
        ("delete", "t", None, 10, None),
        ("insert", "t", 1, 11, "x"),
        ("delete", "t", 1, None, None),
        ("insert", "t", 2, 11, "x"),
    ]
    assert told[2].event.before == {"id": 1, "a": 10, "v": "w"}
    assert [change.event.moved_from for change in told if change.event.moved_from] == [{"a": 10}, {"id": 1}]
    assert [change.schema.key for change in told[2::2]] == [("id",), ("a",), ("id",)]
    schema, rows = scene.load("t")
    assert schema == told[-1].schema
    assert rows == [{"id": 2, "a": 11, "v": "x"}]


def test_a_table_that_gets_an_identity_moves_to_the_publication_with_updates(scene: Scene) -> None:
    follow(scene, "create table t (id int)")
    assert publication_of_each_table(scene) == {f"{scene.name}_inserts"}
    scene.run("insert into t values (1)", FULL)
    scene.restart()
    assert publication_of_each_table(scene) == {scene.name}
    scene.run("update t set id = 2")
    assert scene.short() == [("insert", "t", 1), ("update", "t", 2)]


def test_a_table_that_loses_its_identity_leaves_the_publication_before_an_update_fails(scene: Scene) -> None:
    follow(scene, "create table t (id int primary key)")
    scene.run("insert into t values (1)", "alter table t drop constraint t_pkey")
    scene.restart()
    assert publication_of_each_table(scene) == {f"{scene.name}_inserts"}
    scene.run("update t set id = 2", "insert into t values (3)")
    assert scene.short() == [("insert", "t", 1), ("insert", "t", 3)]


def test_a_key_on_other_columns_is_the_key_from_the_next_row_on(scene: Scene) -> None:
    follow(scene, "create table t (id int primary key, a int not null)")
    scene.run("insert into t values (1, 10)")
    scene.together("alter table t drop constraint t_pkey", "alter table t add primary key (a)")
    scene.run("update t set id = 2", "update t set a = 11")
    told = scene.told()
    assert [change.schema.key for change in told] == [("id",), ("a",), ("a",), ("a",)]
    assert told[-1].event.moved_from == {"a": 10}


# --- values that are not sent ------------------------------------------------------------------------------


def test_a_large_value_that_did_not_change_is_named_as_unsent_and_is_not_null(scene: Scene) -> None:
    follow(scene, "create table t (id int primary key, big text, small text, huge text)")
    scene.run(
        f"insert into t values (1, {BIG}, 's', {BIG})",
        "update t set small = 'x'",
        f"update t set huge = {BIG}",
        "update t set big = null",
    )
    told = scene.told()
    assert [change.event.unchanged for change in told] == [(), ("big", "huge"), ("big",), ("huge",)]
    assert (told[1].values["big"], told[3].values["big"]) == (None, None)
    (row,) = scene.agreed(told, "t")
    assert scene.ask("select big, small, huge from t") == [(row["big"], row["small"], row["huge"])]


def test_under_full_a_large_value_that_did_not_change_is_filled_from_the_old_row(scene: Scene) -> None:
    follow(scene, "create table t (id int primary key, big text, small text)", FULL)
    scene.run(f"insert into t values (1, {BIG}, 's')", "update t set small = 'x'", "update t set id = 2")
    scene.run("delete from t")
    told = scene.told()
    assert [change.event.unchanged for change in told] == [()] * 5
    assert {change.values["big"] for change in told} == {told[0].values["big"]}
    before = told[1].event.before
    assert before is not None
    assert (before["small"], before["big"]) == ("s", told[0].values["big"])


def test_a_large_value_in_a_keyless_table_is_sent_whole_with_every_change(scene: Scene) -> None:
    follow(scene, "create table t (big text, n int)", FULL)
    scene.run(f"insert into t values ({BIG}, 1), ({BIG}, 2)")
    scene.run("update t set n = 3 where n = 1", "delete from t where n = 2")
    told = scene.told()
    assert told[2].values["big"] == told[0].values["big"]
    assert told[3].values["big"] == told[1].values["big"]
    assert scene.agreed(told, "t") == [{"big": told[0].values["big"], "n": 3}]


def test_a_key_update_names_the_large_values_that_it_does_not_send(scene: Scene) -> None:
    follow(scene, "create table t (id int primary key, big text, n int)")
    scene.run(f"insert into t values (1, {BIG}, 1)", "update t set id = 2, n = 2")
    told = scene.told()
    assert [change.event.unchanged for change in told] == [(), (), ("big",)]
    assert told[2].event.moved_from == {"id": 1}
    ((stored,),) = scene.ask("select big from t")
    assert scene.agreed(told, "t") == [{"id": 2, "big": stored, "n": 2}]


def test_a_large_key_is_sent_with_every_change(scene: Scene) -> None:
    # Too large to be sent when it did not change, small enough for an index once it is compressed.
    follow(scene, "create table t (id text primary key, n int)", "alter table t alter id set storage external")
    key = "repeat('k', 2500)"
    scene.run(f"insert into t values ({key}, 1)", "update t set n = 2", "update t set id = 'short'", "delete from t")
    told = scene.told()
    assert [change.op for change in told] == ["insert", "update", "delete", "insert", "delete"]
    assert [change.values["id"] for change in told] == ["k" * 2500] * 3 + ["short"] * 2
    assert told[3].event.moved_from == {"id": "k" * 2500}
    assert scene.agreed(told, "t") == []


def test_a_value_that_is_large_and_compressed_inside_the_row_is_always_sent(scene: Scene) -> None:
    follow(scene, "create table t (id int primary key, big text, n int)")
    scene.run("insert into t values (1, repeat('x', 5000), 1)", "update t set n = 2")
    assert [(change.event.unchanged, len(change.values["big"])) for change in scene.told()] == [((), 5000)] * 2
