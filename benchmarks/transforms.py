"""transforms: what rules cost, compared with the same work done by hand.

A batch of 65,536 changes of one table (an id, a mail address, a decimal and a country) goes through one rule, again and
again. Ours is `TransformPlan.apply`: it turns a change batch with its operations, sequence numbers and positions into
another one. The peer is the least code that gives the same values by hand, on the table's own columns alone:

- mask: `pyarrow.compute.binary_join_element_wise` of stars and the last four characters;
- filter: `RecordBatch.filter` with `pyarrow.compute.greater`;
- hash: `hashlib.sha256` of each value in a list comprehension, as Arrow has no such kernel, and back into an array;
- encrypt: `AESGCM.encrypt` of each value in a list comprehension, with a nonce each, and back into an array.

For this to be fair:
- both sides get the same Arrow arrays, in one process and one thread, in turn within a round, after one run each that
  is not counted;
- their results are compared value by value before the clock; ciphertexts are decrypted first.

Only hashing has a limit: there the work is ours. Filtering is Arrow's work, and encryption OpenSSL's, on both
sides; these cells show what a change batch adds to it. NumPy masks texts of which each character is a byte.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks import machine, ours
from benchmarks.cells import Cell, CellsResult, Pair
from benchmarks.measure import BenchError, progress, scaled
from tailrace.model import change
from tailrace.model.batch import ChangeBatch
from tailrace.model.schema import Column, Identity, TableId, TableSchema
from tailrace.transforms.rules import Decrypt, Encrypt, Filter, KeySource, Mask, Rule, Sha256, Transforms
from tailrace.transforms.transform_plan import TransformPlan

ROWS = 65_536
SECONDS = 1.0
"""Of one side in one round."""
HASH = "hash"
HASH_TIMES_MIN = 1.0
SECRET = "42" * 32
TABLE = TableSchema(
    table=TableId("public", "people"),
    relation=1,
    key=("id",),
    identity=Identity.KEY,
    columns=(
        Column(name="id", source_type="bigint", type=pa.int64()),
        Column(name="mail", source_type="text", type=pa.string()),
        Column(name="amount", source_type="numeric(12,2)", type=pa.decimal128(12, 2)),
        Column(name="country", source_type="text", type=pa.string()),
    ),
)
RULES: dict[str, Rule] = {
    HASH: Sha256(columns=("mail",)),
    "mask": Mask(columns=("mail",), keep_last=4),
    "filter": Filter(where="amount > 500.50"),
    "encrypt": Encrypt(columns=("mail",), key="main"),
}


@dataclass(frozen=True)
class TransformsBench:
    """The bench."""

    about: str
    name: str = "transforms"
    limits: dict[str, float] = field(default_factory=lambda: {HASH: HASH_TIMES_MIN})

    def run(self, rounds: int, scale: float) -> CellsResult:
        """Each rule next to its peer, in every round."""
        described = machine.describe(ours.log_parent_folder())
        batch = make_batch(ROWS)
        seconds = max(0.05, SECONDS * scale)
        sides = {name: (_ours(name, batch), peer_of(name, batch)) for name in RULES}
        for name, (mine, theirs) in sides.items():
            _compare(name, mine(), theirs())
        found: dict[str, list[Pair]] = {name: [] for name in RULES}
        for number in range(rounds):
            progress(f"round {number + 1} of {rounds}")
            for name, (mine, theirs) in sides.items():
                found[name].append(Pair(ours=_rate(mine, seconds), peer=_rate(theirs, seconds)))
        cells = tuple(
            Cell(name=name, unit="rows/s", must_reach=self.limits.get(name), pairs=tuple(pairs), costs=False)
            for name, pairs in found.items()
        )
        return CellsResult(
            name=self.name,
            peer_name="plain pyarrow",
            cells=cells,
            machine=described,
            setup={"ours": "TransformPlan.apply", "workload": f"{scaled(ROWS, 1.0):,} changes a batch"},
            scale=scale,
        )


def make_batch(rows: int) -> ChangeBatch:
    """Inserts, as a stream brings them."""
    random = np.random.default_rng(1)
    numbers = np.arange(rows)
    cents = pa.array(random.integers(0, 100_000, rows)).cast(pa.decimal128(20, 0)).cast(pa.decimal128(22, 2))
    zero = pa.array(np.zeros(rows, np.int64))
    columns = {
        change.OP: pa.array(["insert"]).take(zero),
        change.SEQ: pa.array(numbers),
        change.POSITION: pa.array(["0/1A2B3C4D"]).take(zero),
        change.TX: zero,
        change.TX_INDEX: pa.array(numbers.astype(np.int32)),
        change.COMMITTED_AT: zero.cast(pa.timestamp("us", "UTC")),
        "id": pa.array(numbers),
        "mail": pa.array([f"somebody.{number * 7919 % 1_000_003}@mail.example.org" for number in range(rows)]),
        "amount": pc.divide(cents, pa.scalar(Decimal(100))).cast(pa.decimal128(12, 2), safe=False),
        "country": pa.array(["DE", "FR", "PL", "AT"]).take(pa.array(numbers % 4)),
    }
    fields = [one for one in TABLE.change_schema() if one.name in columns]
    return ChangeBatch(
        schema=TABLE, data=pa.RecordBatch.from_arrays([columns[one.name] for one in fields], schema=pa.schema(fields))
    )


def plan_for(*rules: Rule) -> TransformPlan:
    given = Transforms.model_validate({"rules": rules, "keys": {"main": KeySource(env="KEY")}})
    return TransformPlan(given, environment={"KEY": SECRET})


def _ours(name: str, batch: ChangeBatch) -> Callable[[], pa.RecordBatch]:
    plan = plan_for(RULES[name])
    return lambda: plan.apply(batch).batches[0].data.select(TABLE.names)


def peer_of(name: str, batch: ChangeBatch) -> Callable[[], pa.RecordBatch]:
    """The same by hand, on the table's own columns."""
    rows = batch.data.select(TABLE.names)
    place = rows.schema.get_field_index("mail")

    def replaced(values: pa.Array) -> pa.RecordBatch:
        return rows.set_column(place, "mail", values)

    def masked() -> pa.RecordBatch:
        mail = rows.column("mail")
        stars = pc.binary_repeat(pa.scalar("*"), pc.subtract(pc.utf8_length(mail), pa.scalar(4, pa.int32())))
        return replaced(pc.binary_join_element_wise(stars, pc.utf8_slice_codeunits(mail, -4), ""))

    def hashed() -> pa.RecordBatch:
        mails = rows.column("mail").to_pylist()
        return replaced(pa.array([hashlib.sha256(mail.encode()).hexdigest() for mail in mails], pa.string()))

    def kept() -> pa.RecordBatch:
        return rows.filter(pc.greater(rows.column("amount"), pa.scalar(Decimal("500.50"))))

    def encrypted() -> pa.RecordBatch:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        cipher, bound = AESGCM(bytes.fromhex(SECRET)), b'["public.people", "mail"]'
        made = []
        for mail in rows.column("mail").to_pylist():
            nonce = os.urandom(12)
            made.append(b"\x01\x04main" + nonce + cipher.encrypt(nonce, mail.encode(), bound))
        return replaced(pa.array(made, pa.binary()))

    return {HASH: hashed, "mask": masked, "filter": kept, "encrypt": encrypted}[name]


def _compare(name: str, mine: pa.RecordBatch, theirs: pa.RecordBatch) -> None:
    if name == "encrypt":
        mine, theirs = (_decrypted(side) for side in (mine, theirs))
    if not mine.equals(theirs):
        raise BenchError(f"{name}: the two sides do not give the same", hint="Look for a mistake in either.")


def _decrypted(rows: pa.RecordBatch) -> pa.RecordBatch:
    schema = plan_for(RULES["encrypt"]).transformed_schema(TABLE)
    return plan_for(Decrypt(columns=("mail",))).transform_rows(schema, rows)


def _rate(work: Callable[[], object], seconds: float) -> float:
    began, rounds = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        work()
        rounds += 1
    return rounds * ROWS / (time.perf_counter() - began)


BENCH = TransformsBench(about=__doc__)
