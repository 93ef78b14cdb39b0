"""Events as JSON: our own form, and one that readers of Debezium's messages take.

Both are lossless as far as JSON is: numbers beyond what a double holds, bytes, times and whatever is no number
(`NaN`, `Infinity`) are texts. A column that the server did not send is left out of ours, and is Debezium's own
placeholder in the other.
"""

from __future__ import annotations

import base64
import json
import math
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

from tailrace.errors import ConfigError
from tailrace.model.change import Operation
from tailrace.model.event import Event, Row
from tailrace.model.position import Lsn
from tailrace.validation import require_instance

UNAVAILABLE = "__debezium_unavailable_value"
_DEBEZIUM_OPS = {
    Operation.INSERT: "c", Operation.UPDATE: "u", Operation.DELETE: "d", Operation.READ: "r", Operation.TRUNCATE: "t",
    Operation.MESSAGE: "m",
}  # fmt: skip
_EVENT_HINT = "Give one by one what `batch.events()` gives."
_EPOCH = date(1970, 1, 1)
_EXACT_MAX = 1 << 53
"""Whole numbers up to here are the same for every reader of JSON."""


def to_json(event: Event) -> dict[str, Any]:
    """Our own form. What is not there is left out: absent is not null. `table` is for people: `a.b`.`c` and `a`.`b.c`
    read alike there, so `schema` and `name` say it apart."""
    require_instance("event", event, Event, _EVENT_HINT)
    table = event.schema.table
    found: dict[str, Any] = {
        "v": event.version,
        "op": event.operation.value,
        "table": event.table,
        "schema": table.schema,
        "name": table.name,
        "seq": event.seq,
        "position": event.position,
        "tx": event.transaction,
        "tx_index": event.tx_index,
        "committed_at": event.committed_at.isoformat() if event.committed_at else None,
    }
    if event.key is not None:
        found["key"] = _row(event.key)
    if event.after is not None:
        found["after"] = _row({name: value for name, value in event.after.items() if name not in event.unchanged})
    if event.unchanged:
        found["unchanged"] = list(event.unchanged)
    if event.before is not None:
        found["before"] = _row(event.before)
    if event.moved_from is not None:
        found["moved_from"] = _row(event.moved_from)
    if event.kept_for is not None:
        found["kept_for"] = _row(event.kept_for)
    if event.unfit:
        found["unfit"] = dict(event.unfit)
    return found


def to_json_line(event: Event) -> str:
    """Our own form on one line."""
    return json.dumps(to_json(event), ensure_ascii=False, separators=(",", ":"))


def to_debezium(event: Event, *, name: str = "tailrace", database: str = "") -> dict[str, Any]:
    """As Debezium's connectors for PostgreSQL write it without a schema, `decimal.handling.mode` being `string`.

    `name` and `database` are what the readers know the server and its database by: an event does not."""
    require_instance("event", event, Event, _EVENT_HINT)
    for what, given in (("name", name), ("database", database)):
        require_instance(what, given, str, f'Give a text: `{what}="shop"`.')
    table = event.schema.table
    at_ms = int(event.committed_at.timestamp() * 1000) if event.committed_at else None
    snapshot = event.operation is Operation.READ
    after = event.after
    if after is not None:
        after = {column: UNAVAILABLE if column in event.unchanged else value for column, value in after.items()}
    return {
        "before": None if event.before is None else _debezium_row(event.before),
        "after": None if after is None or event.operation is Operation.MESSAGE else _debezium_row(after),
        "source": {
            "version": str(event.version),
            "connector": "tailrace",
            "name": name,
            "ts_ms": at_ms,
            "snapshot": "true" if snapshot else "false",
            "db": database,
            "schema": table.schema,
            "table": table.name,
            "txId": None if snapshot else event.transaction,
            "lsn": _lsn(event.position),
            "sequence": json.dumps([event.position, str(event.seq)]),
        },
        "op": _DEBEZIUM_OPS.get(event.operation, "m"),
        "ts_ms": at_ms,
        "transaction": None
        if snapshot
        else {"id": str(event.transaction), "total_order": event.tx_index + 1, "data_collection_order": None},
    }


def to_debezium_line(event: Event, *, name: str = "tailrace", database: str = "") -> str:
    """Debezium's form on one line."""
    found = to_debezium(event, name=name, database=database)
    return json.dumps(found, ensure_ascii=False, separators=(",", ":"))


def _lsn(position: str | None) -> int | None:
    """Positions of other sources may have a slash in them too."""
    try:
        return Lsn.parse(position or "").value
    except ConfigError:
        return None


def _row(row: Row) -> dict[str, Any]:
    return {name: _value(value) for name, value in row.items()}


def _value(value: Any) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return value if -_EXACT_MAX <= value <= _EXACT_MAX else str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else _not_finite(value)
    if isinstance(value, (bytes, bytearray)):
        return base64.b64encode(value).decode()
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    if isinstance(value, dict):
        return _row(value)
    if isinstance(value, (list, tuple)):
        return [_value(item) for item in value]
    return str(value)


def _not_finite(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _debezium_row(row: Row) -> dict[str, Any]:
    return {name: _debezium_value(value) for name, value in row.items()}


def _debezium_value(value: Any) -> Any:
    if isinstance(value, datetime):
        if value.tzinfo is not None:
            return value.isoformat().replace("+00:00", "Z")
        return round((value - datetime.combine(_EPOCH, time())) / timedelta(microseconds=1))
    if isinstance(value, date):
        return (value - _EPOCH).days
    if isinstance(value, time):
        since = timedelta(hours=value.hour, minutes=value.minute, seconds=value.second, microseconds=value.microsecond)
        return since // timedelta(microseconds=1)
    if isinstance(value, int) and not isinstance(value, bool):
        return value  # its readers know the column's type
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [_debezium_value(item) for item in value]
    return _value(value)
