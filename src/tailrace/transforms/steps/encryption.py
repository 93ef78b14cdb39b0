"""AES-256-GCM of whole columns: each value by itself, bound to its table and column.

    1 byte    the format, 2
    1 byte    how long the key's id is, and the id
    12 bytes  a nonce of its own, at random
    …         the ciphertext, and its tag of 16 bytes

What comes out is made of ciphertexts and nulls alone: a value that cannot be encrypted is null and said to have
failed, so no way leads from a failure to the plaintext. A ciphertext moved to another column, or to another table, does
not decrypt. Format 1, which is still read, was bound to `schema.table` as one text, so `a.b`.`c` and `a`.`b.c` were one
to it. The library that encrypts takes one value a call, so here, and only here, there is a loop over values.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tailrace.model.schema import TableId
from tailrace.transforms.secrets import Cipher
from tailrace.transforms.steps.hashes import as_bytes
from tailrace.transforms.transform_errors import RowFault, RowFaults

FORMAT, FORMAT_OLD = 2, 1
NONCE_BYTES = 12
CIPHER_ERRORS = (ValueError, OverflowError, TypeError, MemoryError, RuntimeError)
FOREIGN = "the value is none that `encrypt` has made"
UNNAMED = "the value was encrypted with a key that is not named"
CHANGED = "it was changed since, or encrypted for another table or column"


def associated_data(table: TableId, column: str) -> bytes:
    """The associated data: which column of which table this is."""
    return _said(table.schema, table.name, column)


def accepted_associated_data(tables: Sequence[TableId], column: str) -> dict[int, tuple[bytes, ...]]:
    """By format, what a value of this column is bound to if it is of one of these tables."""
    return {
        FORMAT: tuple(associated_data(table, column) for table in tables),
        FORMAT_OLD: tuple({_said(str(table), column) for table in tables}),
    }


def possible_tables(name: str) -> tuple[TableId, ...]:
    """The tables that a name may mean: one, unless it has more than one dot."""
    dots = [at for at, char in enumerate(name) if char == "."]
    return tuple(TableId(name[:at], name[at + 1 :]) for at in dots) or (TableId("", name),)


def _said(*names: str) -> bytes:
    return json.dumps(names, ensure_ascii=False).encode()


def encrypt(values: pa.Array, cipher: Cipher, key_id: str, bound: bytes) -> tuple[pa.Array, RowFaults]:
    """The ciphertexts, null where there was null; and the rows that could not be encrypted, null as well."""
    n = len(values)
    named = key_id.encode()
    head = bytes([FORMAT, len(named)]) + named
    nonces = os.urandom(NONCE_BYTES * n)
    out: list[bytes | None] = [None] * n
    failed = np.zeros(n, np.bool_)
    for row, plain in enumerate(as_bytes(values).to_pylist()):
        if plain is not None:
            nonce = nonces[NONCE_BYTES * row : NONCE_BYTES * (row + 1)]
            try:
                out[row] = head + nonce + cipher.encrypt(nonce, plain, bound)
            except CIPHER_ERRORS:
                failed[row] = True
    why = f"the value cannot be encrypted with the key `{key_id}`"
    return pa.array(out, pa.binary()), (RowFault(reason=why, rows=failed),)


def decrypt(
    values: pa.Array, cipher: Callable[[str], Cipher | None], bounds: Mapping[int, Sequence[bytes]]
) -> tuple[pa.Array, RowFaults]:
    """The plaintexts as bytes; rows whose key is not known, or that were tampered with, are null and have failed.
    `bounds`: by format, one of which a value must be bound to."""
    from cryptography.exceptions import InvalidTag

    n = len(values)
    out: list[bytes | None] = [None] * n
    failed: dict[str, list[int]] = {}
    for row, sealed in enumerate(values.to_pylist()):
        if sealed is None:
            continue
        why = FOREIGN
        try:
            if len(sealed) < 2 or sealed[0] not in bounds:
                raise ValueError(why)
            end = 2 + sealed[1]
            named = sealed[2:end].decode()
            key = cipher(named)
            # Only a key of ours is named: what stands in its place otherwise may be anything.
            why = UNNAMED if key is None else f"the value cannot be decrypted with the key `{named}`: {CHANGED}"
            if key is None:
                raise ValueError(why)
            out[row] = _opened(key, sealed[end : end + NONCE_BYTES], sealed[end + NONCE_BYTES :], bounds[sealed[0]])
        except (*CIPHER_ERRORS, InvalidTag):
            failed.setdefault(why, []).append(row)
    return pa.array(out, pa.binary()), tuple(RowFault(reason=why, rows=_mask(rows, n)) for why, rows in failed.items())


def _mask(rows: Sequence[int], count: int) -> npt.NDArray[np.bool_]:
    found = np.zeros(count, np.bool_)
    found[list(rows)] = True
    return found


def _opened(key: Cipher, nonce: bytes, sealed: bytes, bounds: Sequence[bytes]) -> bytes:
    from cryptography.exceptions import InvalidTag

    for bound in bounds[:-1]:
        with suppress(InvalidTag):
            return key.decrypt(nonce, sealed, bound)
    return key.decrypt(nonce, sealed, bounds[-1])
