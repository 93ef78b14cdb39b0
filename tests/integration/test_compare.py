"""The demo's judge: it says equal only of what is equal, and names what is not.

The Delta tables are written here by hand, from values written down here, never by Tailrace.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from deltalake import write_deltalake
from psycopg import sql
from psycopg.rows import TupleRow

from tailrace.demo.compare import LakeUnreadable, TableVerdict, compare, table_folder
from tailrace.demo.server import EmbeddedPostgres
from tests.support.pipelines import eventually

Connection = psycopg.Connection[TupleRow]


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(settings={"fsync": "off"}) as running:
        yield running


@pytest.fixture
def source(server: EmbeddedPostgres) -> Iterator[Connection]:
    """An empty `public` schema."""
    with server.connect() as connection:
        connection.execute("DROP SCHEMA IF EXISTS public CASCADE; CREATE SCHEMA public")
        yield connection


def judge(connection: Connection, lake: Path, table: str, schema: str = "public") -> TableVerdict:
    url = f"postgresql://postgres@127.0.0.1:{connection.info.port}/postgres"
    (verdict,) = compare(url, lake, [(schema, table)])
    return verdict


def write(lake: Path, table: str, columns: dict[str, Any], **options: Any) -> None:
    write_deltalake(str(table_folder(lake, "public", table)), pa.table(columns), **options)


def pairs(*rows: tuple[int, str | None]) -> dict[str, Any]:
    return {
        "id": pa.array([row[0] for row in rows], pa.int32()),
        "name": pa.array([row[1] for row in rows], pa.string()),
    }


def make_pairs(source: Connection, *rows: tuple[int, str | None], key: str = "PRIMARY KEY") -> None:
    source.execute(f"CREATE TABLE t (id int {key}, name text)".encode())
    for row in rows:
        source.execute("INSERT INTO t VALUES (%s, %s)", row)


def test_a_true_copy_is_equal_whatever_the_order_of_its_rows(source: Connection, tmp_path: Path) -> None:
    make_pairs(source, (1, "a"), (2, None), (3, ""))
    write(tmp_path, "t", pairs((3, ""), (1, "a"), (2, None)))
    assert judge(source, tmp_path, "t") == TableVerdict(schema="public", table="t", source_rows=3, lake_rows=3)
    assert judge(source, tmp_path, "t").equal


def test_a_row_the_lake_lacks_is_missing(source: Connection, tmp_path: Path) -> None:
    make_pairs(source, (1, "a"), (2, "b"))
    write(tmp_path, "t", pairs((1, "a")))
    verdict = judge(source, tmp_path, "t")
    assert (verdict.missing, verdict.extra, verdict.differing) == (1, 0, 0)
    assert verdict.sample == ("id=2",)
    assert not verdict.equal


def test_a_row_left_behind_in_the_lake_is_extra(source: Connection, tmp_path: Path) -> None:
    make_pairs(source, (1, "a"))
    write(tmp_path, "t", pairs((1, "a"), (7, "old")))
    verdict = judge(source, tmp_path, "t")
    assert (verdict.missing, verdict.extra, verdict.differing) == (0, 1, 0)
    assert verdict.sample == ("id=7",)


def test_a_row_that_stands_twice_in_the_lake_is_extra_once(source: Connection, tmp_path: Path) -> None:
    make_pairs(source, (1, "a"))
    write(tmp_path, "t", pairs((1, "a"), (1, "a")))
    verdict = judge(source, tmp_path, "t")
    assert (verdict.missing, verdict.extra, verdict.differing) == (0, 1, 0)


def test_a_changed_value_is_differing_and_is_not_shown(source: Connection, tmp_path: Path) -> None:
    make_pairs(source, (1, "secret"), (2, "b"))
    write(tmp_path, "t", pairs((1, "stale"), (2, "b")))
    verdict = judge(source, tmp_path, "t")
    assert (verdict.missing, verdict.extra, verdict.differing) == (0, 0, 1)
    assert "secret" not in repr(verdict)
    assert "stale" not in repr(verdict)


def test_null_is_not_the_empty_string(source: Connection, tmp_path: Path) -> None:
    make_pairs(source, (1, None), (2, ""))
    write(tmp_path, "t", pairs((1, ""), (2, None)))
    assert judge(source, tmp_path, "t").differing == 2


def test_rows_without_a_key_are_counted_as_often_as_they_stand(source: Connection, tmp_path: Path) -> None:
    make_pairs(source, (1, "a"), (1, "a"), (1, "a"), (2, "b"), key="")
    write(tmp_path, "t", pairs((1, "a"), (2, "b"), (2, "b")))
    verdict = judge(source, tmp_path, "t")
    assert (verdict.missing, verdict.extra, verdict.differing) == (2, 1, 0)
    assert verdict.sample == ()


def test_two_empty_tables_are_equal(source: Connection, tmp_path: Path) -> None:
    make_pairs(source)
    write(tmp_path, "t", pairs())
    assert judge(source, tmp_path, "t") == TableVerdict(schema="public", table="t")


def test_rows_missing_from_an_empty_lake_table_are_counted(source: Connection, tmp_path: Path) -> None:
    make_pairs(source, (1, "a"), (2, "b"))
    write(tmp_path, "t", pairs())
    assert judge(source, tmp_path, "t").missing == 2


def test_rows_of_an_emptied_source_table_are_extra(source: Connection, tmp_path: Path) -> None:
    make_pairs(source)
    write(tmp_path, "t", pairs((1, "a"), (2, "b")))
    assert judge(source, tmp_path, "t").extra == 2


def test_a_table_the_lake_lacks_is_not_equal_even_if_empty(source: Connection, tmp_path: Path) -> None:
    make_pairs(source)
    verdict = judge(source, tmp_path, "t")
    assert verdict.columns == ("the lake does not have the table",)
    assert not verdict.equal


def test_a_table_the_source_lacks_is_not_equal(source: Connection, tmp_path: Path) -> None:
    assert judge(source, tmp_path, "nowhere").columns == ("the source does not have the table",)


def test_columns_that_differ_are_named_and_the_rest_is_still_compared(source: Connection, tmp_path: Path) -> None:
    source.execute("CREATE TABLE t (id int PRIMARY KEY, price numeric(8, 2), gone text, same text)")
    source.execute("INSERT INTO t VALUES (1, 1.50, 'x', 'a'), (2, 2, 'y', 'b')")
    columns = {"id": pa.array([1, 2], pa.int32()), "price": [1.5, 2.0], "same": ["a", "c"], "_op": ["i", "i"]}
    write(tmp_path, "t", columns)
    verdict = judge(source, tmp_path, "t")
    assert verdict.columns == (
        "price: must be decimal with scale 2, but the lake has double",
        "gone: not in the lake",
        "_op: not in the source",
    )
    assert (verdict.missing, verdict.extra, verdict.differing) == (0, 0, 1)


def test_a_timestamp_of_the_wrong_kind_is_named(source: Connection, tmp_path: Path) -> None:
    source.execute("CREATE TABLE t (at timestamptz)")
    write(tmp_path, "t", {"at": pa.array([], pa.timestamp("us"))})
    (problem,) = judge(source, tmp_path, "t").columns
    assert "must be timestamp in UTC" in problem


def test_generated_columns_are_compared_only_where_they_are_mirrored(source: Connection, tmp_path: Path) -> None:
    source.execute("CREATE TABLE t (id int PRIMARY KEY, twice int GENERATED ALWAYS AS (id * 2) STORED)")
    source.execute("INSERT INTO t VALUES (4)")
    for name, columns, equal in (("none", {}, True), ("right", {"twice": 8}, True), ("wrong", {"twice": 9}, False)):
        values = {column: pa.array([value], pa.int32()) for column, value in ({"id": 4} | columns).items()}
        write(tmp_path / name, "t", values)
        assert judge(source, tmp_path / name, "t").equal is equal


def test_rows_of_a_child_table_are_not_the_parents(source: Connection, tmp_path: Path) -> None:
    make_pairs(source, (1, "a"))
    source.execute("CREATE TABLE child () INHERITS (t); INSERT INTO child VALUES (2, 'b')")
    write(tmp_path, "t", pairs((1, "a")))
    assert judge(source, tmp_path, "t").equal


@pytest.mark.parametrize(
    ("schema", "table", "folder"),
    [
        ("Mixed Case", 'the "quoted" one', 'Mixed Case/the "quoted" one'),
        ("a/b", "100% {sure}", "a%2Fb/100%25 {sure}"),
        (".hidden", "tab\there", "%2Ehidden/tab%09here"),
        ("ünï=x", "it's\\so?#", "ünï=x/it's\\so?#"),
    ],
)
def test_names_are_taken_verbatim(source: Connection, tmp_path: Path, schema: str, table: str, folder: str) -> None:
    name = sql.Identifier(schema, table)
    source.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)))
    source.execute(sql.SQL('CREATE TABLE {} ("The %s {{Key}}" int PRIMARY KEY, "a ""b""" text)').format(name))
    source.execute(sql.SQL("INSERT INTO {} VALUES (1, 'x')").format(name))
    # delta-rs cannot make a table in a folder with a percent sign or a backslash, so it is moved there.
    columns = {"The %s {Key}": pa.array([1], pa.int32()), 'a "b"': ["x"]}
    write_deltalake(str(tmp_path / "made"), pa.table(columns))
    (tmp_path / "lake" / folder).parent.mkdir(parents=True)
    (tmp_path / "made").rename(tmp_path / "lake" / folder)
    verdict = judge(source, tmp_path / "lake", table, schema)
    assert verdict == TableVerdict(schema=schema, table=table, source_rows=1, lake_rows=1)


# Of each type: the source's column, values of it as SQL, and the lake's column with the same values.
TYPES: list[tuple[str, list[str], pa.Array]] = [
    ("boolean", ["true", "false"], pa.array([True, False])),
    ("smallint", ["-32768", "7"], pa.array([-32768, 7], pa.int16())),
    ("integer", ["-2147483648", "0"], pa.array([-(2**31), 0], pa.int32())),
    ("bigint", ["-9223372036854775808", "9007199254740993"], pa.array([-(2**63), 9007199254740993])),
    ("real", ["1.1", "'NaN'", "'-0'", "'-Infinity'"],
     pa.array([1.1, float("nan"), -0.0, float("-inf")], pa.float32())),
    ("double precision", ["0.1", "'NaN'", "'-0'", "1e-300", "'Infinity'"],
     pa.array([0.1, float("nan"), -0.0, 1e-300, float("inf")])),
    ("numeric(12, 2)", ["0.05", "-0.05", "0", "-9999999999.99"],
     pa.array([Decimal(text) for text in ("0.05", "-0.05", "0", "-9999999999.99")], pa.decimal128(12, 2))),
    ("numeric(38, 10)", ["1e-10", "1234567890123456789012345678.0000000001"],
     pa.array([Decimal("1e-10"), Decimal("1234567890123456789012345678.0000000001")], pa.decimal128(38, 10))),
    ("numeric(3, -2)", ["12345", "-99900"], pa.array([Decimal(12300), Decimal(-99900)], pa.decimal128(5, 0))),
    ("numeric(2, 4)", ["0.0012"], pa.array([Decimal("0.0012")], pa.decimal128(4, 4))),
    ("numeric", ["1.50", "'NaN'", "1e50"], pa.array(["1.50", "NaN", "1" + "0" * 50])),
    ("numeric(50, 2)", ["1.50"], pa.array(["1.50"])),
    ("text", ["'a,\"b\"'", "''", r"E'\\N \n\r\t\\.'", "'ü€😀'", r"'\N'"],
     pa.array(['a,"b"', "", "\\N \n\r\t\\.", "ü€😀", "\\N"])),
    ("char(4)", ["'ab'"], pa.array(["ab  "])),
    ("varchar(9)", ["'NULL'"], pa.array(["NULL"])),
    ("bytea", [r"'\x00ff61'", r"'\x'"], pa.array([b"\x00\xffa", b""])),
    ("date", ["'2024-02-29'", "'0044-03-15 BC'", "'infinity'", "'-infinity'", "'12024-01-01'"],
     pa.array([19782, -735160, 2932896, -719162, 3672148], pa.date32())),
    ("timestamptz",
     ["'2024-01-01 12:00:00.000001+02'", "'infinity'", "'-infinity'", "'12024-01-01 00:00+00'"],
     pa.array([1704103200000001, 253402300799999999, -62135596800000000, 317273587200000000],
              pa.timestamp("us", "UTC"))),
    ("timestamp", ["'1969-12-31 23:59:59.999999'", "'infinity'", "'-infinity'", "'0044-03-15 BC'"],
     pa.array([-1, 253402300799999999, -62135596800000000, -63517824000000000], pa.timestamp("us"))),
    ("uuid", ["'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11'"], pa.array(["a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"])),
    ("json", ["'{\"b\":1,  \"a\": 2}'"], pa.array(['{"b":1,  "a": 2}'])),
    ("jsonb", ["'{\"b\":1,  \"a\": 2}'"], pa.array(['{"a": 2, "b": 1}'])),
    ("mood", ["'so so'"], pa.array(["so so"])),
    ("small", ["5"], pa.array([5], pa.int32())),
    ("time", ["'12:30'"], pa.array(["12:30:00"])),
    ("interval", ["'1 day 02:00'"], pa.array(["1 day 02:00:00"])),
    ("inet", ["'10.0.0.1'"], pa.array(["10.0.0.1"])),
    ("bit(3)", ["B'101'"], pa.array(["101"])),
    ("point", ["'(1,2.5)'"], pa.array(["(1,2.5)"])),
    ("int4range", ["'[1,5)'"], pa.array(["[1,5)"])),
    ("uuid[]", ["'{a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11}'"],
     pa.array(["{a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11}"])),
    ("mood[]", ["'{\"so so\",NULL}'"], pa.array(['{"so so",NULL}'])),
    ("numeric[]", ["'{1.50}'"], pa.array(["{1.50}"])),
    ("boolean[]", ["'{t,f,NULL}'", "'{}'"], pa.array([[True, False, None], []])),
    ("integer[]", ["'{1,NULL,-3}'", "'[0:1]={4,5}'"],
     pa.array([[1, None, -3], [4, 5]], pa.list_(pa.int32()))),
    ("double precision[]", ["'{NaN,-0,0.1,NULL}'"], pa.array([[float("nan"), -0.0, 0.1, None]])),
    ("numeric(6, 2)[]", ["'{0.05,-1,NULL}'"],
     pa.array([[Decimal("0.05"), Decimal(-1), None]], pa.list_(pa.decimal128(6, 2)))),
    ("text[]", [r"ARRAY['a,b', NULL, 'NULL', 'q\"r', '', '\', E'x\ny', '{z}']", "'{}'", "'{\"\"}'"],
     pa.array([["a,b", None, "NULL", 'q\\"r', "", "\\", "x\ny", "{z}"], [], [""]])),
    ("bytea[]", [r"ARRAY['\x00ff'::bytea, NULL]"], pa.array([[b"\x00\xff", None]])),
    ("date[]", ["'{2024-02-29,NULL,infinity}'"], pa.array([[19782, None, 2932896]], pa.list_(pa.date32()))),
    ("timestamptz[]", ["'{2024-01-01 12:00:00.000001+02}'"],
     pa.array([[1704103200000001]], pa.list_(pa.timestamp("us", "UTC")))),
]  # fmt: skip


@pytest.fixture
def odd_types(source: Connection) -> None:
    source.execute("CREATE TYPE mood AS ENUM ('so so'); CREATE DOMAIN small AS int")


@pytest.mark.usefixtures("odd_types")
@pytest.mark.parametrize(("declared", "values", "stored"), TYPES, ids=[case[0] for case in TYPES])
def test_each_type_is_equal_to_its_form_in_the_lake_and_to_no_other_value(
    source: Connection, tmp_path: Path, declared: str, values: list[str], stored: pa.Array
) -> None:
    source.execute(f"CREATE TABLE t (n int PRIMARY KEY, v {declared})".encode())
    rows = [*values, "NULL"]
    for number, value in enumerate(rows):
        source.execute(f"INSERT INTO t VALUES ({number}, {value})".encode())
    nulls = pa.nulls(1, stored.type)
    numbers = pa.array(range(len(rows)), pa.int32())
    write(tmp_path, "t", {"n": numbers, "v": pa.concat_arrays([stored, nulls])})
    right = judge(source, tmp_path, "t")
    assert right == TableVerdict(schema="public", table="t", source_rows=len(rows), lake_rows=len(rows))
    # Each value one row further on: not one of them is right now.
    write(tmp_path, "t", {"n": numbers, "v": pa.concat_arrays([nulls, stored])}, mode="overwrite")
    assert judge(source, tmp_path, "t").differing == len(rows)


@pytest.mark.parametrize(
    ("declared", "value", "stored"),
    [
        ("numeric(5, 2)", "'NaN'", pa.array([Decimal(0)], pa.decimal128(5, 2))),
        ("timestamp", "'294276-12-31'", pa.array([2**63 - 1], pa.timestamp("us"))),
        ("integer[]", "'{{1,2},{3,4}}'", pa.array([[1, 2, 3, 4]], pa.list_(pa.int32()))),
        ("date[]", "'{{2024-02-29}}'", pa.array([[19782]], pa.list_(pa.date32()))),
        ("double precision", "0", pa.array([-0.0])),
    ],
)
def test_a_value_the_lake_cannot_hold_is_differing(
    source: Connection, tmp_path: Path, declared: str, value: str, stored: pa.Array
) -> None:
    source.execute(f"CREATE TABLE t (n int PRIMARY KEY, v {declared})".encode())
    source.execute(f"INSERT INTO t VALUES (1, {value})".encode())
    write(tmp_path, "t", {"n": pa.array([1], pa.int32()), "v": stored})
    assert judge(source, tmp_path, "t").differing == 1


def test_a_key_of_several_columns_is_named_in_its_own_order(source: Connection, tmp_path: Path) -> None:
    source.execute("CREATE TABLE t (b text, a int, v text, PRIMARY KEY (a, b))")
    source.execute("INSERT INTO t VALUES ('x', 1, 'left'), ('y', 1, 'same')")
    write(tmp_path, "t", {"b": ["x", "y"], "a": pa.array([1, 1], pa.int32()), "v": ["right", "same"]})
    assert judge(source, tmp_path, "t").sample == ("a=1, b=x",)


def test_files_older_than_a_column_have_nulls_there(source: Connection, tmp_path: Path) -> None:
    make_pairs(source, (1, None), (2, "b"))
    write(tmp_path, "t", {"id": pa.array([1], pa.int32())})
    write(tmp_path, "t", pairs((2, "b")), mode="append", schema_mode="merge")
    assert judge(source, tmp_path, "t").equal


def test_only_the_newest_version_of_a_table_counts(source: Connection, tmp_path: Path) -> None:
    make_pairs(source, (1, "new"))
    write(tmp_path, "t", pairs((1, "old"), (2, "old")))
    write(tmp_path, "t", pairs((1, "new")), mode="overwrite")
    assert judge(source, tmp_path, "t").equal


def test_a_partitioned_lake_table_is_read_as_its_log_says(source: Connection, tmp_path: Path) -> None:
    make_pairs(source, (1, "a/b %"), (2, None), (3, "a=b"))
    write(tmp_path, "t", pairs((1, "a/b %"), (2, None), (3, "a=b")), partition_by=["name"])
    assert judge(source, tmp_path, "t").equal
    write(tmp_path, "t", pairs((1, "a/b"), (2, None), (3, "a=b")), partition_by=["name"], mode="overwrite")
    assert not judge(source, tmp_path, "t").equal


def test_rows_that_a_deletion_vector_took_are_not_there(source: Connection, tmp_path: Path) -> None:
    make_pairs(source, (2, "b"))
    write(tmp_path, "t", pairs((1, "a"), (2, "b")))
    delete_the_first_row_by_a_vector(table_folder(tmp_path, "public", "t") / "_delta_log")
    assert judge(source, tmp_path, "t").equal


def delete_the_first_row_by_a_vector(log: Path) -> None:
    """https://github.com/delta-io/delta/blob/master/PROTOCOL.md#deletion-vector-format, inline and in Z85."""
    z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
    rfc1924 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
    bitmap = struct.pack("<IQIIIHHIH", 1681511377, 1, 0, 12346, 1, 0, 0, 16, 0)
    text = base64.b85encode(bitmap, pad=True).decode().translate(str.maketrans(rfc1924, z85))
    lines = (log / f"{0:020}.json").read_text().splitlines()
    (add,) = [json.loads(line)["add"] for line in lines if "add" in json.loads(line)]
    vector = {"storageType": "i", "pathOrInlineDv": text, "sizeInBytes": len(bitmap), "cardinality": 1}
    features = {"readerFeatures": ["deletionVectors"], "writerFeatures": ["deletionVectors"]}
    actions = [
        {"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, **features}},
        {"remove": {"path": add["path"], "dataChange": True, "deletionTimestamp": 1}},
        {"add": {**add, "deletionVector": vector}},
    ]
    (log / f"{1:020}.json").write_text("\n".join(json.dumps(action) for action in actions))


def test_a_broken_delta_log_is_a_clear_error(source: Connection, tmp_path: Path) -> None:
    make_pairs(source)
    write(tmp_path, "t", pairs())
    (table_folder(tmp_path, "public", "t") / "_delta_log" / f"{0:020}.json").write_text("{")
    with pytest.raises(LakeUnreadable, match="cannot be read"):
        judge(source, tmp_path, "t")


def test_a_data_file_that_is_gone_is_an_error_and_not_missing_rows(source: Connection, tmp_path: Path) -> None:
    make_pairs(source, (1, "a"))
    write(tmp_path, "t", pairs((1, "a")))
    (file,) = table_folder(tmp_path, "public", "t").glob("*.parquet")
    file.unlink()
    with pytest.raises(LakeUnreadable, match="but missing"):
        judge(source, tmp_path, "t")


def test_all_tables_are_judged_in_the_order_asked(source: Connection, tmp_path: Path) -> None:
    make_pairs(source, (1, "a"))
    source.execute("CREATE TABLE u AS SELECT * FROM t")
    write(tmp_path, "t", pairs((1, "a")))
    write(tmp_path, "u", pairs((1, "b")))
    url = f"postgresql://postgres@127.0.0.1:{source.info.port}/postgres"
    verdicts = compare(url, tmp_path, [("public", "u"), ("public", "t")])
    assert [(verdict.table, verdict.equal) for verdict in verdicts] == [("u", False), ("t", True)]
    idle = "SELECT FROM pg_stat_activity WHERE state LIKE 'idle in%'"
    assert eventually(lambda: not source.execute(idle).fetchall()), "sessions that are left open"
