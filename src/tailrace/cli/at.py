"""`tailrace at`: which versions of the lake tables belong together."""

from __future__ import annotations

import argparse

from tailrace.cli.output import print_json, print_out
from tailrace.errors import ExitCode
from tailrace.pipeline.points import find_point
from tailrace.pipeline.settings import PipelineSettings


def at(settings: PipelineSettings, arguments: argparse.Namespace) -> ExitCode:
    """Show the point, and each table's version there."""
    point = find_point(settings, time=arguments.time, position=arguments.position)
    tables = [
        {"schema": table.schema, "table": table.name, "version": version,
         "path": str(settings.tables.layout.path(table))}
        for table, version in sorted(point.versions.items())
    ]  # fmt: skip
    if arguments.json:
        print_json({
            "time": point.time.isoformat(), "position": str(point.position), "commit": point.commit, "tables": tables,
        })  # fmt: skip
        return ExitCode.OK
    lines = [f"{point.time.isoformat()} · position {point.position} · commit {point.commit}"]
    lines += [f"{table['schema']}.{table['table']}: version {table['version']}" for table in tables]
    print_out("\n".join(lines))
    return ExitCode.OK
