"""Events as JSON: Tailrace's own format, and Debezium's message format.

Both are lossless as far as JSON is: numbers that a double cannot hold, bytes, times and non-finite numbers (`NaN`,
`Infinity`) are texts. An unsent column is left out of our format, and is Debezium's own placeholder in the other.
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
_EVENT_HINT = "Pass the events of `batch.events()` one by one."
_EPOCH = date(1970, 1, 1)
_EXACT_MAX = 1 << 53
"""Whole numbers up to here are the same for every reader of JSON."""


def to_json(event: Event) -> dict[str, Any]:
    """Return the event in our own format. Fields without a value are left out: absent is not null.

    `table` is for people: `a.b`.`c` and `a`.`b.c` look alike there, so `schema` and `name` keep the parts separate.
    """
    require_instance("event", event, Event, _EVENT_HINT)
    table = event.schema.table
    fields: dict[str, Any] = {
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
        fields["key"] = _row(event.key)
    if event.after is not None:
        fields["after"] = _row({name: value for name, value in event.after.items() if name not in event.unchanged})
    if event.unchanged:
        fields["unchanged"] = list(event.unchanged)
    if event.before is not None:
        fields["before"] = _row(event.before)
    if event.moved_from is not None:
        fields["moved_from"] = _row(event.moved_from)
    if event.kept_for is not None:
        fields["kept_for"] = _row(event.kept_for)
    if event.unfit:
        fields["unfit"] = dict(event.unfit)
    return fields


def to_json_line(event: Event) -> str:
    """Return the event in our own format, as one line."""
    return json.dumps(to_json(event), ensure_ascii=False, separators=(",", ":"))


def to_debezium(event: Event, *, name: str = "tailrace", database: str = "") -> dict[str, Any]:
    """Return the event as Debezium's PostgreSQL connector writes it.

    The message has no schema, and `decimal.handling.mode` is `string`. `name` and `database` are the names by which
    readers know the server and its database: an event does not contain them.
    """
    require_instance("event", event, Event, _EVENT_HINT)
    for field, text in (("name", name), ("database", database)):
        require_instance(field, text, str, f'Give a text: `{field}="shop"`.')
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
    """Return the event in Debezium's format, as one line."""
    message = to_debezium(event, name=name, database=database)
    return json.dumps(message, ensure_ascii=False, separators=(",", ":"))


def _lsn(position: str | None) -> int | None:
    """Return the LSN as a number. Positions of other sources may contain a slash too, so each is parsed."""
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
