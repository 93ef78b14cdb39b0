"""`tailrace at`: which versions of the lake tables belong together, and which tables have none there."""

from __future__ import annotations

import argparse

from tailrace.cli.log_lines import one_line
from tailrace.cli.output import print_json, print_out
from tailrace.control.point_in_time import find_point
from tailrace.errors import ExitCode
from tailrace.pipeline.config.settings import PipelineSettings


def at(settings: PipelineSettings, arguments: argparse.Namespace) -> ExitCode:
    """Show the point, and each table's version there."""
    point = find_point(settings, time=arguments.time, position=arguments.position)
    tables = [
        {
            "schema": table.schema,
            "table": table.name,
            "version": version,
            "path": str(settings.tables.layout.path(table)),
        }
        for table, version in sorted(point.versions.items())
    ]
    missing = [
        {"schema": table.schema, "table": table.name, "state": absence.state, "why": absence.why}
        for table, absence in sorted(point.missing.items())
    ]
    if arguments.json:
        print_json(
            {
                "time": point.time.isoformat(),
                "position": str(point.position),
                "commit": point.commit,
                "tables": tables,
                "missing": missing,
            }
        )
        return ExitCode.OK
    lines = [f"{point.time.isoformat()} · position {point.position} · commit {point.commit}"]
    lines += [f"{table['schema']}.{table['table']}: version {table['version']}" for table in tables]
    lines += [f"{table['schema']}.{table['table']}: missing ({table['state']}): {table['why']}" for table in missing]
    print_out("\n".join(map(one_line, lines)))
    return ExitCode.OK
