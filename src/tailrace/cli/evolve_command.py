"""`tailrace evolve`: what would be done to the lake tables."""

from __future__ import annotations

import argparse

from tailrace.cli.log_lines import one_line
from tailrace.cli.output import print_json, print_out
from tailrace.control.evolution_preview import preview
from tailrace.errors import ConfigError, ExitCode
from tailrace.pipeline.config.settings import PipelineSettings
from tailrace.pipeline.report import TableEvolution


def evolve(settings: PipelineSettings, arguments: argparse.Namespace) -> ExitCode:
    """Show it. Doing it is the pipeline's own work."""
    if not arguments.dry_run:
        raise ConfigError(
            "tables evolve by themselves while `tailrace run` or `tailrace apply` runs",
            hint=f"See what they would do now: `tailrace evolve {arguments.file} --dry-run`.",
        )
    found = preview(settings)
    if arguments.json:
        print_json({"tables": [table.to_json() for table in found]})
    elif not found:
        print_out("no table is loaded yet")
    else:
        print_out("\n".join(map(_line, found)))
    return ExitCode.OK


def _line(table: TableEvolution) -> str:
    said = list(table.steps)
    if table.action == "refresh":
        said.append(f"loaded anew: {table.why}")
    elif table.action == "stop":
        said.append(f"stops: {table.why}. {table.hint}")
    elif table.why is not None:
        said.append(f"nothing to do: {table.why}")
    return one_line(f"{table.schema}.{table.table}: {'; '.join(said) or 'nothing to do'}")
