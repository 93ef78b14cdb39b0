"""Run `tailrace schema-history`: show every schema that tables have had."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from tailrace.cli import log_view
from tailrace.cli.log_lines import one_line
from tailrace.cli.output import human_count, print_json, print_out
from tailrace.control import schema_history_view
from tailrace.errors import ExitCode
from tailrace.state.schema_history import SchemaEvent, SchemaHistory, SchemaVersion

_STYLES = {SchemaEvent.CREATE: "green", SchemaEvent.DROP: "red"}


def schema_history(history: SchemaHistory, arguments: argparse.Namespace) -> ExitCode:
    """Show the history of all tables, or of one."""
    histories = schema_history_view.read_history(history, arguments.table)
    if arguments.json:
        print_json({"tables": [_json(versions) for versions in histories]})
    else:
        print_out(history_text(histories))
    return ExitCode.OK


def _json(versions: Sequence[SchemaVersion]) -> dict[str, object]:
    table = versions[0].table
    return {
        "schema": table.schema,
        "table": table.name,
        "versions": [
            {name: value for name, value in version.to_json().items() if name not in ("schema", "table")}
            for version in versions
        ],
    }


def history_text(histories: Sequence[Sequence[SchemaVersion]]) -> str:
    """Return one line for each version, by table."""
    if not histories:
        return "no tables yet"
    view = Table(box=SIMPLE_HEAD, pad_edge=False)
    view.add_column("table", overflow="fold", min_width=10)
    view.add_column("version", justify="right", no_wrap=True)
    for title in ("event", "from position", "committed"):
        view.add_column(title, no_wrap=True)
    view.add_column("what changed", overflow="fold", min_width=20)
    for versions in histories:
        for version in versions:
            view.add_row(
                Text(one_line(str(version.table)) if version is versions[0] else ""),
                str(version.version),
                Text(version.event.value, style=_STYLES.get(version.event, "")),
                _position(version),
                _time(version),
                Text(one_line("; ".join(_changed(version)))),
            )
    return log_view.render_text(view)


def _changed(version: SchemaVersion) -> Iterator[str]:
    if version.event is SchemaEvent.CREATE:
        key = ", ".join(version.schema.key)
        yield human_count(len(version.schema.columns), "column") + (f", key {key}" if key else ", no key")
    if version.event is SchemaEvent.DROP:
        new = [change.new for change in version.evolution.changes] if version.evolution else []
        yield f"renamed to {new[0]}" if new else "dropped"
    elif version.evolution is not None:
        yield from log_view.describe_evolution(version.evolution.to_json())
    if version.ddl:
        yield version.ddl


def _position(version: SchemaVersion) -> str:
    return str(version.position) if version.position is not None else log_view.NONE


def _time(version: SchemaVersion) -> str:
    if version.time is None:
        return log_view.NONE
    return version.time.isoformat(timespec="milliseconds").replace("+00:00", "Z")
