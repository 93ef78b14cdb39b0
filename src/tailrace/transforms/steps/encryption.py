"""AES-256-GCM of whole columns: each value alone, bound to its table and column.

    1 byte    the format, 2
    1 byte    how long the key's id is, and the id
    12 bytes  a nonce of its own, at random
    …         the ciphertext, and its tag of 16 bytes

The output has only ciphertexts and nulls. A value that cannot be encrypted is null and reported as failed, so a failure
never reveals the plaintext. A ciphertext moved to another column or table does not decrypt. Format 1 is still read. It
was bound to `schema.table` as one text, so `a.b`.`c` and `a`.`b.c` were the same to it. The encryption library takes
one value per call, so here, and only here, there is a loop over values.
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
FOREIGN = "the value was not made by `encrypt`"
UNNAMED = "the value was encrypted with a key that is not defined"
CHANGED = "it was changed since, or encrypted for another table or column"


def associated_data(table: TableId, column: str) -> bytes:
    """Return the associated data that binds a value to its column."""
    return _encode_names(table.schema, table.name, column)


def accepted_associated_data(tables: Sequence[TableId], column: str) -> dict[int, tuple[bytes, ...]]:
    """Return, by format, what a value of this column may be bound to."""
    return {
        FORMAT: tuple(associated_data(table, column) for table in tables),
        FORMAT_OLD: tuple({_encode_names(str(table), column) for table in tables}),
    }


def possible_tables(name: str) -> tuple[TableId, ...]:
    """Return the tables that a name may mean.

    There is one, unless the name has more than one dot.
    """
    splits = [index for index, char in enumerate(name) if char == "."]
    return tuple(TableId(name[:index], name[index + 1 :]) for index in splits) or (TableId("", name),)


def _encode_names(*names: str) -> bytes:
    return json.dumps(names, ensure_ascii=False).encode()


def encrypt(values: pa.Array, cipher: Cipher, key_id: str, bound: bytes) -> tuple[pa.Array, RowFaults]:
    """Return the ciphertexts, null for null; and the rows that failed, null as well."""
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
    reason = f"the value cannot be encrypted with the key `{key_id}`"
    return pa.array(out, pa.binary()), (RowFault(reason=reason, rows=failed),)


def decrypt(
    values: pa.Array, cipher: Callable[[str], Cipher | None], bounds: Mapping[int, Sequence[bytes]]
) -> tuple[pa.Array, RowFaults]:
    """Return the plaintexts as bytes, and the rows that failed, which are null.

    A row fails if its key is unknown or it was tampered with. `bounds` has, by format, the associated data of which a
    value must be bound to one.
    """
    from cryptography.exceptions import InvalidTag

    n = len(values)
    out: list[bytes | None] = [None] * n
    failed: dict[str, list[int]] = {}
    for row, sealed in enumerate(values.to_pylist()):
        if sealed is None:
            continue
        reason = FOREIGN
        try:
            if len(sealed) < 2 or sealed[0] not in bounds:
                raise ValueError(reason)
            end = 2 + sealed[1]
            named = sealed[2:end].decode()
            key = cipher(named)
            # Only a known key's id is quoted: the bytes of an unknown one may be anything.
            reason = UNNAMED if key is None else f"the value cannot be decrypted with the key `{named}`: {CHANGED}"
            if key is None:
                raise ValueError(reason)
            out[row] = _open(key, sealed[end : end + NONCE_BYTES], sealed[end + NONCE_BYTES :], bounds[sealed[0]])
        except (*CIPHER_ERRORS, InvalidTag):
            failed.setdefault(reason, []).append(row)
    return pa.array(out, pa.binary()), tuple(
        RowFault(reason=reason, rows=_mask(rows, n)) for reason, rows in failed.items()
    )


def _mask(rows: Sequence[int], count: int) -> npt.NDArray[np.bool_]:
    mask = np.zeros(count, np.bool_)
    mask[list(rows)] = True
    return mask


def _open(key: Cipher, nonce: bytes, sealed: bytes, bounds: Sequence[bytes]) -> bytes:
    from cryptography.exceptions import InvalidTag

    for bound in bounds[:-1]:
        with suppress(InvalidTag):
            return key.decrypt(nonce, sealed, bound)
    return key.decrypt(nonce, sealed, bounds[-1])
