"""Every way to write a row at a real server, and the changes that arrive."""

from __future__ import annotations

import psycopg
import pytest

from tests.support.tables import BIG, Scene


@pytest.fixture
def items(scene: Scene) -> Scene:
    """A followed table `t` with a key and two columns."""
    scene.run("create table t (id int primary key, name text, n int default 0)")
    scene.follow("t")
    return scene


# --- rows --------------------------------------------------------------------------------------------------


def test_inserts_updates_and_deletes_arrive_with_their_values(items: Scene) -> None:
    items.run(
        "insert into t values (1, 'a', 1), (2, null, 2)",
        "update t set name = 'b' where id = 1",
        "delete from t where id = 2",
    )
    told = items.told()
    assert [change.short for change in told] == [
        ("insert", "t", 1, "a", 1),
        ("insert", "t", 2, None, 2),
        ("update", "t", 1, "b", 1),
        ("delete", "t", 2, None, None),
    ]
    assert [change.event.seq for change in told] == sorted(change.event.seq for change in told)
    assert items.agreed(told, "t") == [{"id": 1, "name": "b", "n": 1}]


def test_two_updates_of_one_row_in_one_transaction_both_arrive(items: Scene) -> None:
    items.run("insert into t values (1, 'a')")
    items.together("update t set n = 1", "update t set n = 2")
    assert items.short()[1:] == [("update", "t", 1, "a", 1), ("update", "t", 1, "a", 2)]


def test_an_update_that_changes_nothing_arrives_too(items: Scene) -> None:
    items.run("insert into t values (1, 'a')", "update t set name = name")
    assert items.short()[1:] == [("update", "t", 1, "a", 0)]


def test_a_row_that_is_inserted_and_deleted_in_one_transaction_arrives_twice(items: Scene) -> None:
    items.together("insert into t values (1)", "delete from t")
    assert [change[0] for change in items.short()] == ["insert", "delete"]


def test_copied_rows_arrive_like_inserted_ones(items: Scene) -> None:
    with items.connection.cursor().copy("copy t (id, name) from stdin") as copy:
        for n in range(500):
            copy.write_row((n, f"tab\tand\nline {n}"))
    told = items.told()
    assert [change.values["id"] for change in told] == list(range(500))
    assert {change.op for change in told} == {"insert"}
    assert len({change.event.transaction for change in told}) == 1
    assert items.agreed(told, "t")[0] == {"id": 0, "name": "tab\tand\nline 0", "n": 0}


def test_an_insert_on_conflict_arrives_as_its_result(items: Scene) -> None:
    items.run(
        "insert into t values (1, 'a')",
        "insert into t values (1, 'x'), (2, 'b') on conflict (id) do update set name = excluded.name, n = t.n + 1",
        "insert into t values (1, 'y'), (3, 'c') on conflict do nothing",
    )
    assert items.short()[1:] == [("update", "t", 1, "x", 1), ("insert", "t", 2, "b", 0), ("insert", "t", 3, "c", 0)]


def test_a_merge_arrives_as_its_results(items: Scene) -> None:
    items.run(
        "insert into t values (1, 'a'), (2, 'b')",
        "merge into t using (values (1, 'x'), (2, null), (3, 'c')) s(id, name) on t.id = s.id "
        "when matched and s.name is null then delete when matched then update set name = s.name "
        "when not matched then insert (id, name) values (s.id, s.name)",
    )
    told = items.told()
    assert sorted(change.short[:3] for change in told[2:]) == [
        ("delete", "t", 2),
        ("insert", "t", 3),
        ("update", "t", 1),
    ]
    assert [row["name"] for row in items.agreed(told, "t")] == ["x", "c"]


def test_changes_by_triggers_and_foreign_keys_arrive_in_the_same_transaction(scene: Scene) -> None:
    scene.run(
        "create table parent (id int primary key)",
        "create table child (id int primary key, parent int references parent on delete cascade on update cascade)",
        "create table trail (said text primary key)",
        "create function note() returns trigger language plpgsql as "
        f"$$ begin insert into {scene.name}.trail values (tg_op || old.id); return old; end $$",
        "create trigger note after update or delete on child for each row execute function note()",
        "insert into parent values (1), (2)",
        "insert into child values (10, 1), (20, 2)",
    )
    scene.follow()
    scene.run("update parent set id = 3 where id = 1", "delete from parent where id = 2")
    told = scene.told()
    assert [change.short for change in told] == [
        ("delete", "parent", 1),
        ("insert", "parent", 3),
        ("update", "child", 10, 3),
        ("insert", "trail", "UPDATE10"),
        ("delete", "parent", 2),
        ("delete", "child", 20, None),
        ("insert", "trail", "DELETE20"),
    ]
    assert len({change.event.transaction for change in told}) == 2


# --- truncate ----------------------------------------------------------------------------------------------


def test_a_truncate_of_several_tables_arrives_once_for_each(scene: Scene) -> None:
    scene.run("create table a (id int primary key)", "create table b (id int)", "create table c (id int primary key)")
    scene.follow("a", "b")
    scene.together(
        "insert into a values (1)", "insert into b values (1)", "truncate a, b, c", "insert into a values (2)"
    )
    told = scene.told()
    assert sorted(change.short for change in told[2:4]) == [("truncate", "a"), ("truncate", "b")]
    assert told[4].short == ("insert", "a", 2)
    assert scene.agreed(told, "a") == [{"id": 2}]
    assert scene.agreed(told, "b") == []


def test_a_truncate_that_cascades_arrives_for_the_tables_it_reached(scene: Scene) -> None:
    scene.run(
        "create table parent (id int primary key)",
        "create table child (id int primary key, parent int references parent)",
    )
    scene.follow()
    scene.run("insert into parent values (1)", "insert into child values (1, 1)", "truncate parent cascade")
    told = scene.told()
    assert sorted(change.short for change in told[2:]) == [("truncate", "child"), ("truncate", "parent")]
    assert scene.agreed(told, "parent") == scene.agreed(told, "child") == []


def test_a_truncate_that_restarts_identity_lets_the_same_keys_arrive_again(scene: Scene) -> None:
    scene.run("create table t (id int generated always as identity primary key, s serial, name text)")
    scene.follow()
    scene.run(
        "insert into t (name) values ('a'), ('b')", "truncate t restart identity", "insert into t (name) values ('c')"
    )
    told = scene.told()
    assert [change.short for change in told[2:]] == [("truncate", "t"), ("insert", "t", 1, 1, "c")]
    assert scene.agreed(told, "t") == [{"id": 1, "s": 1, "name": "c"}]


# --- keys that move ----------------------------------------------------------------------------------------


def test_a_key_update_is_a_delete_and_an_insert_that_names_the_old_key(items: Scene) -> None:
    items.run("insert into t values (1, 'a')", "update t set id = 2, name = 'b'")
    told = items.told()
    assert [change.short for change in told[1:]] == [("delete", "t", 1, None, None), ("insert", "t", 2, "b", 0)]
    assert [change.event.moved_from for change in told[1:]] == [None, {"id": 1}]
    assert items.agreed(told, "t") == [{"id": 2, "name": "b", "n": 0}]


def test_a_key_that_moves_twice_in_one_transaction_keeps_an_unsent_value(items: Scene) -> None:
    items.run(f"insert into t values (1, {BIG})")
    items.together("update t set id = 2", "update t set id = 3", "update t set n = 5")
    told = items.told()
    moves = [(change.values["id"], change.event.moved_from, change.event.unchanged) for change in told]
    assert moves[1:] == [
        (1, None, ()),
        (2, {"id": 1}, ("name",)),
        (2, None, ()),
        (3, {"id": 2}, ("name",)),
        (3, None, ("name",)),
    ]
    ((size,),) = items.ask("select length(name) from t")
    (row,) = items.agreed(told, "t")
    assert (row["id"], row["n"], len(row["name"])) == (3, 5, size)


def test_keys_that_are_swapped_in_one_transaction_end_up_swapped(items: Scene) -> None:
    items.run(f"insert into t values (1, 'one'), (2, {BIG})")
    items.together(*[f"update t set id = {new} where id = {old}" for old, new in ((1, 0), (2, 1), (0, 2))])
    told = items.told()
    assert [change.event.moved_from for change in told if change.event.moved_from] == [{"id": 1}, {"id": 2}, {"id": 0}]
    one, two = items.agreed(told, "t")
    assert (one["id"], len(one["name"])) == (1, 6400)
    assert (two["id"], two["name"]) == (2, "one")


def test_one_part_of_a_key_of_two_columns_moves(scene: Scene) -> None:
    scene.run("create table t (b int, v text, a text, primary key (a, b))")
    scene.follow()
    scene.run("insert into t values (1, 'v', 'k')", "update t set b = 2", "update t set v = 'w'")
    told = scene.told()
    assert [change.event.moved_from for change in told] == [None, None, {"b": 1, "a": "k"}, None]
    assert scene.agreed(told, "t") == [{"b": 2, "v": "w", "a": "k"}]


# --- transactions ------------------------------------------------------------------------------------------


def test_a_prepared_transaction_arrives_when_it_is_committed_in_the_order_of_commits(items: Scene) -> None:
    items.run("begin", "insert into t values (1)", f"prepare transaction '{items.name}'")
    items.run("insert into t values (2)")
    assert items.short() == [("insert", "t", 2, None, 0)]
    items.run(f"commit prepared '{items.name}'")
    assert items.short() == [("insert", "t", 1, None, 0)]


def test_a_prepared_transaction_that_is_rolled_back_never_arrives(items: Scene) -> None:
    items.run("begin", "insert into t values (1)", "truncate t", f"prepare transaction '{items.name}'")
    items.run(f"rollback prepared '{items.name}'", "insert into t values (1, 'kept')")
    assert items.short() == [("insert", "t", 1, "kept", 0)]


def test_a_savepoint_that_is_rolled_back_leaves_nothing(items: Scene) -> None:
    items.together(
        "insert into t values (1)",
        "savepoint a",
        "insert into t values (2)",
        "update t set n = 9",
        "rollback to a",
        "insert into t values (3)",
        "savepoint b",
        "insert into t values (4)",
        "release b",
    )
    told = items.told()
    assert [change.values["id"] for change in told] == [1, 3, 4]
    assert {change.values["n"] for change in told} == {0}
    assert len({change.event.transaction for change in told}) == 1


def test_a_hundred_nested_subtransactions_arrive_in_order(items: Scene) -> None:
    nested = [statement for n in range(100) for statement in (f"savepoint s{n}", f"insert into t values ({n})")]
    back = [f"release s{n}" for n in reversed(range(100))]
    items.together(*nested, "update t set n = 1 where id = 0", *back)
    told = items.told()
    assert [change.values["id"] for change in told] == [*range(100), 0]
    assert len({change.event.transaction for change in told}) == 1


def test_an_exception_block_leaves_what_it_did_not_undo(items: Scene) -> None:
    items.run(
        "insert into t values (1)",
        "do $$ begin for k in 1..3 loop begin insert into t values (k, 'tried'); "
        "exception when unique_violation then update t set name = 'there' where id = k; end; end loop; end $$",
    )
    assert items.short()[1:] == [
        ("update", "t", 1, "there", 0),
        ("insert", "t", 2, "tried", 0),
        ("insert", "t", 3, "tried", 0),
    ]


def test_a_transaction_that_fails_or_is_rolled_back_leaves_nothing(items: Scene) -> None:
    items.run("begin", "insert into t values (1)", "rollback")
    with pytest.raises(psycopg.errors.UniqueViolation):
        items.together("insert into t values (2)", "insert into t values (2)")
    items.run("insert into t values (3)")
    assert items.short() == [("insert", "t", 3, None, 0)]


def test_a_replicated_change_arrives_like_any_other(items: Scene) -> None:
    items.run(f"select pg_replication_origin_create('{items.name}')")
    items.run(f"select pg_replication_origin_session_setup('{items.name}')")
    items.run(
        "begin",
        "select pg_replication_origin_xact_setup('0/1', '2020-01-01')",
        "insert into t values (1)",
        "update t set n = 1",
        "commit",
    )
    items.run("select pg_replication_origin_session_reset()", f"select pg_replication_origin_drop('{items.name}')")
    items.run("insert into t values (2)")
    assert items.short() == [("insert", "t", 1, None, 0), ("update", "t", 1, None, 1), ("insert", "t", 2, None, 0)]


def test_transactions_that_overlap_arrive_in_the_order_of_their_commits(items: Scene) -> None:
    with psycopg.connect(items.capture.settings.url, autocommit=True) as other:
        items.run("begin", "insert into t values (1)")
        other.execute(f"insert into {items.name}.t values (2)".encode())
        items.run("insert into t values (3)", "commit")
    assert [change[2] for change in items.short()] == [2, 1, 3]
