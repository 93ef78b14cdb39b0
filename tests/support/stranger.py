"""A reader of the change log written from docs/reference/log-format.md alone; it knows nothing of Tailrace's code.

Plain and slow on purpose: if this cannot read a log any more, either the page is wrong or the format has changed.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Row = dict[str, Any]
METADATA = ("_op", "_seq", "_position", "_tx", "_tx_index", "_committed_at", "_commit")
OPTIONAL = ("_unchanged", "_before", "_moved_from", "_unfit")


def checked(path: Path) -> dict[str, Any]:
    stored: dict[str, Any] = json.loads(path.read_bytes())
    crc = stored.pop("crc")
    assert crc == zlib.crc32(json.dumps(stored, sort_keys=True, separators=(",", ":")).encode()), path
    assert stored["format"] == 1
    return stored


def stored_name(name: str) -> str:
    reserved = {*METADATA, *OPTIONAL}
    return name + "_" if name in reserved or name.rstrip("_") in reserved else name


class Stranger:
    """Every row that a log still has, by table name."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._meta = json.loads((log / "meta.json").read_bytes())
        assert self._meta["format"] == 1
        trimmed = log / "trimmed.json"
        self._gone: dict[str, Any] = checked(trimmed) if trimmed.exists() else {"commit": 0, "tables": {}}

    def rows(self) -> dict[str, list[Row]]:
        found: dict[str, list[Row]] = {}
        commit = self._gone["commit"] + 1
        newest = max(int(path.stem) for path in (self._log / "hot").glob("[0-9]*.arrow"))
        while commit <= newest:
            seal = self._seal_of(commit)
            rows = self._sealed(seal) if seal else self._commit(commit)
            for name, row in rows:
                if row["_commit"] >= commit:
                    found.setdefault(name, []).append(row)
            commit = seal["last"] + 1 if seal else commit + 1
        return {name: sorted(rows, key=lambda row: row["_seq"]) for name, rows in found.items()}

    def _shape(self, table: int, version: int) -> dict[str, Any]:
        return checked(self._log / "schemas" / str(table) / f"{version}.json")

    def _name(self, shape: dict[str, Any]) -> str:
        return f"{shape['schema']}.{shape['name']}" if shape["schema"] else shape["name"]

    def _arrow(self, shape: dict[str, Any]) -> pa.Schema:
        own = [
            pa.field(stored_name(field.name), field.type)
            for field in pa.ipc.read_schema(pa.py_buffer(base64.b64decode(shape["arrow"])))
        ]
        key = [field for field, column in zip(own, shape["columns"], strict=True) if column["name"] in shape["key"]]
        unfit = pa.list_(pa.struct([("column", pa.string()), ("text", pa.string())]))
        return pa.schema(
            [
                pa.field("_op", pa.string(), nullable=False),
                pa.field("_seq", pa.int64(), nullable=False),
                pa.field("_position", pa.string(), nullable=False),
                pa.field("_tx", pa.int64(), nullable=False),
                pa.field("_tx_index", pa.int32(), nullable=False),
                pa.field("_committed_at", pa.timestamp("us", "UTC"), nullable=False),
                pa.field("_unchanged", pa.list_(pa.string())),
                pa.field("_before", pa.struct(own)),
                pa.field("_moved_from", pa.struct(key)),
                pa.field("_unfit", unfit),
                *own,
            ]
        )

    def _commit(self, commit: int) -> list[tuple[str, Row]]:
        data = (self._log / "hot" / f"{commit:020d}.arrow").read_bytes()
        magic, size, crc = struct.unpack_from("<8sII", data)
        text = data[16 : 16 + size]
        assert magic == b"TAILRACE"
        assert zlib.crc32(text) == crc
        header = json.loads(text)
        assert (header["log"], header["commit"]) == (self._meta["log"], commit)
        begin = -(-(16 + size) // 64) * 64
        found = []
        for body in header["bodies"]:
            piece = header["big"][body["piece"] - 1] if body["piece"] else None
            held = (self._log / piece["file"]).read_bytes() if piece else data[begin:]
            part = held[body["at"] : body["at"] + body["size"]]
            assert zlib.crc32(part) == body["crc"]
            shape = self._shape(body["table"], body["schema"])
            stored = pa.schema([field for field in self._arrow(shape) if field.name not in body["without"]])
            for row in pa.ipc.read_record_batch(pa.py_buffer(part), stored).to_pylist():
                extra = {"_seq": row["_seq"] + body["base"], "_commit": commit}
                extra |= {"_position": piece["position"]} if piece else {}
                found.append((self._name(shape), dict.fromkeys(OPTIONAL) | row | extra))
        return found

    def _seal_of(self, commit: int) -> dict[str, Any] | None:
        for path in sorted((self._log / "cold").glob("*.json"), reverse=True):
            first, _, last = path.stem.partition("-")
            if int(first) <= commit <= int(last):
                return checked(path)
        return None

    def _sealed(self, seal: dict[str, Any]) -> list[tuple[str, Row]]:
        found = []
        for file in seal["files"]:
            gone = self._gone["tables"].get(str(file["table"]))
            if gone and file["last_seq"] <= gone["last_seq"]:
                continue
            path = self._log / file["file"]
            data = path.read_bytes()
            assert (len(data), zlib.crc32(data)) == (file["size"], file["crc"])
            name = self._name(self._shape(file["table"], file["schema"]))
            found += [(name, dict.fromkeys(OPTIONAL) | row) for row in pq.read_table(path).to_pylist()]
        return found
