"""Any bytes give rows or a clear error: never a crash, a read outside, a hang or unlimited memory.

Inputs run in a process of their own on guarded buffers (tests/fuzz/judge.py). So bytes that break the decoder only fail
a test, with the smallest input that does it. `make fuzz` looks for new inputs; here the kept ones are run again, and
hypothesis tries a few others.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tests.fuzz
from tailrace.capture.postgres.decode import EPOCH_2000
from tests.fuzz.frames import LENGTH_MAX, framed, pieces
from tests.fuzz.judge import MEMORY_MAX, Engine, Fell, Judge
from tests.fuzz.mutator import TYPES
from tests.support.fuzzing import ITEMS, WHOLE, sample
from tests.support.pgoutput import INT4, TEXT, UNSENT, Sent, begin, commit, message, transaction, truncate
from tests.support.thorough import thorough

CORPUS = Path(next(iter(tests.fuzz.__path__))) / "corpus"
FILES = sorted(path for path in CORPUS.glob("*/*"))
CORPUS_BYTES_MAX = 1 << 20
FAULTS = "tests.fuzz.faults:TARGETS"
ATTACK = settings(
    deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with Judge() as found:
        yield found


def is_clear(found: bytes) -> bool:
    """Return whether the result is rows, or an error that says that the bytes are invalid."""
    return found.startswith((b"rows ", b"protocol-violation: ", b"source-error: ", b"value-unfit: ", b"unsupported: "))


# --- what was kept -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_kept_input_gives_rows_or_a_clear_error_and_the_same_when_interpreted(judge: Judge) -> None:
    assert {path.parent.name for path in FILES} == {"decode", "read", "value", "copy"}
    with Judge(Engine.INTERPRETED) as interpreted:
        for path in FILES:
            found = judge.outcome(path.parent.name, path.read_bytes())
            assert is_clear(found), path
            assert interpreted.outcome(path.parent.name, path.read_bytes()) == found, path


def test_what_a_server_sent_gives_rows(judge: Judge) -> None:
    recorded = [path for path in FILES if path.name.startswith("pg16-")]
    assert {path.parent.name for path in recorded} == {"decode", "read", "value", "copy"}
    for path in recorded:
        assert judge.outcome(path.parent.name, path.read_bytes()).startswith(b"rows "), path


def test_the_corpus_holds_every_kind_of_message_and_stays_small() -> None:
    kinds = set()
    for path in CORPUS.glob("decode/pg16-*"):
        data, at = path.read_bytes(), 2
        while at < len(data):
            kinds.add(chr(data[at + 2]))
            at += 2 + int.from_bytes(data[at : at + 2], "big")
    assert kinds == set("BCORYIUDTM")
    assert sum(path.stat().st_size for path in FILES) < CORPUS_BYTES_MAX


# --- any bytes ---------------------------------------------------------------------------------------------


@given(st.sampled_from(["decode", "read", "value", "copy"]), st.binary(max_size=200))
@ATTACK
def test_any_bytes_give_rows_or_a_clear_error(judge: Judge, target: str, data: bytes) -> None:
    assert is_clear(judge.outcome(target, data))


def cut_anywhere(target: str) -> Iterator[bytes]:
    """Yield inputs that end early: each kind of message, text and row after each of its bytes."""
    if target in ("decode", "read"):
        envelope = b"w" + bytes(24) if target == "read" else b""
        good = [envelope + body for body in sample()]
        for number, one in enumerate(good):
            # The reader looks into these alone.
            for size in range(1, len(one)) if target == "decode" or one[25:26] in (b"B", b"C", b"M") else ():
                yield bytes([3 + size % 4, 0]) + framed([*good[:number], one[:size]])
    for path in sorted((CORPUS / target).glob("pg16-*")) if target in ("value", "copy") else ():
        data = path.read_bytes()
        if target == "copy":
            yield from (data[:size] for size in range(2 + int.from_bytes(data[:2], "big"), len(data)))
        else:
            yield from (data[:8] + framed([text[:size]]) for text in pieces(data[8:]) for size in range(len(text)))


@pytest.mark.slow
@pytest.mark.parametrize("target", ["decode", "read", "value", "copy"])
def test_bytes_that_end_anywhere_give_rows_or_a_clear_error(judge: Judge, target: str) -> None:
    found = [judge.outcome(target, data) for data in cut_anywhere(target)]
    assert len(found) > 200
    assert all(map(is_clear, found))


def test_a_message_of_any_length_is_written_inside_its_buffer(judge: Judge) -> None:
    for size in range(80):
        for room in range(4):
            body = message("p", b"c" * size, outside_at=EPOCH_2000)[:-8]
            found = judge.outcome("read", bytes([room, 0]) + framed([b"w" + bytes(24) + body]))
            assert found.startswith(b"rows ")


@pytest.mark.parametrize("size", [1, 9, 17])
def test_the_end_of_a_transaction_is_not_read_outside_its_buffer(judge: Judge, size: int) -> None:
    for before in range(1, 64):
        sent = [b"w" + bytes(24) + body for body in (b"Y" * before, commit()[:size])]
        assert is_clear(judge.outcome("read", bytes(2) + framed(sent)))


EDITS = st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 4), st.binary(max_size=4)), max_size=4)


@given(st.sampled_from(FILES), EDITS)
@ATTACK
def test_bytes_near_those_of_a_server_give_rows_or_a_clear_error(
    judge: Judge, path: Path, edits: list[tuple[int, int, bytes]]
) -> None:
    data = path.read_bytes()
    for place, left_out, put_in in edits:
        at = place % (len(data) + 1)
        data = data[:at] + put_in + data[at + left_out :]
    assert is_clear(judge.outcome(path.parent.name, data))


CELL = st.none() | st.just(UNSENT) | st.binary(max_size=12) | st.sampled_from([b"1", b"-5", b"{1,NULL}", b"NaN"])


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """Changes of two tables with any values, in any order, in transactions or not."""
    messages = [ITEMS.relation(), WHOLE.relation()]
    for _ in range(draw(st.integers(0, 8))):
        table = draw(st.sampled_from([ITEMS, WHOLE]))
        width = len(table.columns) + draw(st.sampled_from([0, 0, 0, 0, 1, -1]))
        first, second = (draw(st.tuples(*[CELL] * width)) for _ in range(2))
        messages.append(
            draw(
                st.sampled_from(
                    [
                        begin(),
                        commit(),
                        table.insert(*first),
                        table.update(*first),
                        table.update(*first, key=second),
                        table.update(*first, old=second),
                        table.delete(key=first),
                        table.delete(old=first),
                        truncate(*[table] * (1 + width % 2)),
                        message("p", b"c"),
                        message("p", b"", outside_at=EPOCH_2000),
                    ]
                )
            )
        )
    whole = draw(st.booleans())
    return draw(st.binary(min_size=2, max_size=2)) + framed(transaction(*messages) if whole else messages)


@given(streams())
@ATTACK
def test_changes_in_any_order_give_rows_or_a_clear_error(judge: Judge, data: bytes) -> None:
    assert is_clear(judge.outcome("decode", data))


@given(st.sampled_from(TYPES), st.integers(-1, 1 << 23), st.lists(st.none() | st.binary(max_size=30), max_size=6))
@ATTACK
def test_any_texts_are_values_or_unfit(judge: Judge, kind: int, modifier: int, texts: list[bytes | None]) -> None:
    cells = [framed([text]) if text is not None else b"\xff\xff" for text in texts]
    found = judge.outcome("value", struct.pack(">Ii", kind, modifier) + b"".join(cells))
    assert found.startswith(b"rows ")


# --- large numbers in few bytes ----------------------------------------------------------------------------

OID = struct.pack(">I", ITEMS.oid)
NARROW = Sent(oid=7, name="narrow", columns=(("a", INT4, -1),), key=("a",))
ANNOUNCED = {
    "columns of a row": b"I" + OID + b"N\xff\xff",
    "columns of an old row": b"D" + OID + b"K\xff\xff",
    "bytes of a value": b"I" + OID + b"N\x00\x04t\xff\xff\xff\xff",
    "bytes of a value, signed": b"I" + OID + b"N\x00\x04t\x80\x00\x00\x00",
    "tables of a truncate": b"T\xff\xff\xff\xff\x00" + OID,
    "tables of a truncate, signed": b"T\x80\x00\x00\x00\x00" + OID,
    "one table, many times": truncate(*[ITEMS] * 1000),
    "columns of a table": NARROW.relation().replace(b"d\x00\x01", b"d\xff\xff"),
    "bytes of a message": message("p", b"c")[:-5] + b"\xff\xff\xff\xffc",
    "columns that no server has": Sent(
        oid=9, name="w", columns=tuple((f"c{n}", INT4, -1) for n in range(1700))
    ).relation(),
    "a name that no server has": Sent(oid=9, name="w", columns=(("n" * 300, INT4, -1),)).relation(),
    "two columns of one name": Sent(oid=9, name="w", columns=(("id", INT4, -1), ("id", TEXT, -1))).relation(),
}  # fmt: skip


@pytest.mark.parametrize("what", ANNOUNCED)
def test_a_count_that_the_bytes_do_not_confirm_is_refused(judge: Judge, what: str) -> None:
    messages = transaction(ITEMS.relation(), WHOLE.relation(), ANNOUNCED[what])
    assert judge.outcome("decode", bytes(2) + framed(messages)).startswith(b"protocol-violation: ")


@pytest.mark.parametrize(
    "text",
    [
        b"[1:2147483647]={1}",
        b"[-2147483648:2147483647][1:2147483647]={}",
        b"{" * 30_000,
        b"{" * 15_000 + b"}" * 15_000,
        b"{" + b"," * 30_000 + b"}",
        b"{" + b"1," * 15_000 + b"1}",
        b'{"' + b"\\" * 30_001,
        b"9" * 30_000,
        b"{" + b'"",' * 10_000 + b'""}',
    ],
    ids=lambda text: repr(text[:12]),
)
def test_no_array_allocates_more_than_its_bytes_can_hold(judge: Judge, text: bytes) -> None:
    for kind in (1007, 1009, 1231, 1185, 23, 1700, 25):
        found = judge.outcome("value", struct.pack(">Ii", kind, 0xA0006) + framed([text]))
        assert found.startswith(b"rows "), kind


def test_the_widest_table_and_its_smallest_rows_stay_within_the_limit(judge: Judge) -> None:
    wide = Sent(oid=9, name="w", columns=tuple((f"c{n}", 1700, 0x260004) for n in range(1600)), key=("c0",))
    rows = [wide.insert(*[None] * 1600)] * 20 + [truncate(wide)] * 500
    sent = [b"w" + bytes(24) + body for body in transaction(wide.relation(), *rows)]
    assert judge.outcome("read", bytes(2) + framed(sent)).startswith(b"rows ")


def test_more_descriptions_than_the_first_buffer_holds_are_all_read(judge: Judge) -> None:
    tables = [Sent(oid=n + 1, name="t", columns=(("id", INT4, -1),)) for n in range(1100)]
    changes = [*(table.relation() for table in tables), tables[0].insert(1), tables[-1].insert(1)]
    assert judge.outcome("decode", bytes(2) + framed(transaction(*changes))).startswith(b"rows ")


# --- the judge itself --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tried() -> Iterator[Judge]:
    with Judge(targets=FAULTS, seconds_max=1.5) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize(("target", "data", "why"), [
    ("behind", b"abc", "exit code -11"),
    ("before", b"abc", "exit code -11"),
    ("endless", b"!", "no answer"),
    ("greedy", (4 * MEMORY_MAX).to_bytes(8, "big"), "MemoryError"),
    ("fickle", b"abc", "AssertionError"),
])  # fmt: skip
def test_every_failure_is_noticed_and_reported_with_its_input(tried: Judge, target: str, data: bytes, why: str) -> None:
    assert tried.outcome("greedy", b"\x02") == b"\x01\x01", "what fell before is replaced"
    with pytest.raises(Fell, match=why) as caught:
        tried.outcome(target, data)
    assert caught.value.data == data
    assert data.hex() in str(caught.value)


@thorough
def test_bounds_checks_detect_what_no_page_guards() -> None:
    with Judge(Engine.CHECKED, targets=FAULTS) as judge, pytest.raises(Fell, match="IndexError"):
        judge.outcome("unguarded", b"abc")


@pytest.mark.slow
def test_a_sample_of_every_message_is_read_the_same_by_every_engine(judge: Judge) -> None:
    data = bytes([3, 0]) + framed(sample())
    assert max(map(len, sample())) < LENGTH_MAX
    with Judge(Engine.INTERPRETED) as interpreted:
        found = {one.outcome("decode", data) for one in (judge, interpreted)}
    assert len(found) == 1
    assert found.pop().startswith(b"rows ")
