"""`tailrace snapshot` and `tailrace retry`: ask for loads, hold them back, have what has failed tried again; then say
what was asked and who does it."""

from __future__ import annotations

import argparse

from tailrace.cli.log_lines import one_line, redact
from tailrace.cli.output import print_json, print_out
from tailrace.control import load_requests
from tailrace.control.load_requests import LoadRequestResult
from tailrace.errors import ConfigError, ExitCode
from tailrace.pipeline.config.settings import PipelineSettings
from tailrace.tasks.load_store import LoadHold, LoadMode


def snapshot(settings: PipelineSettings, arguments: argparse.Namespace) -> ExitCode:
    """Write down what is wanted; whoever applies does it."""
    holding = arguments.pause or arguments.resume or arguments.stop
    if holding and (arguments.where is not None or arguments.mode is not None):
        raise ConfigError(
            "`--where` and `--mode` ask for a load, and `--pause`, `--resume` and `--stop` for none",
            hint="Give one or the other.",
        )
    if holding:
        what = LoadHold.PAUSED if arguments.pause else LoadHold.STOPPED if arguments.stop else None
        asked = load_requests.hold_loads(settings, arguments.tables, what)
    else:
        mode = LoadMode(arguments.mode or LoadMode.REPLACE.value)
        asked = load_requests.request_loads(settings, arguments.tables, mode=mode, where=arguments.where)
    return _tell(asked, arguments)


def retry(settings: PipelineSettings, arguments: argparse.Namespace) -> ExitCode:
    """Write down which tables are to be tried again; whoever applies does it."""
    return _tell(load_requests.request_retries(settings, arguments.tables), arguments)


def _tell(asked: LoadRequestResult, arguments: argparse.Namespace) -> ExitCode:
    if arguments.json:
        print_json(asked.to_json())
    else:
        print_out(request_text(asked, arguments.file))
    return ExitCode.OK


def request_text(asked: LoadRequestResult, file: str) -> str:
    """A line per table, then who does it."""
    none = "no table has failed" if asked.action == "retry" else "no tables yet"
    lines = [f"{table.name}: {table.said}" for table in asked.tables] or [none]
    if asked.note:
        lines.append(f"note: {asked.note}")
    if any(table.done != "nothing" for table in asked.tables):
        if asked.apply_pid is not None:
            by = f"process {asked.apply_pid}" if asked.apply_pid else "the process"
            soon = "a few seconds" if asked.action == "retry" else "a second"
            lines.append(f"{by} that applies now takes it up within {soon}")
        else:
            lines.append(f"nothing applies now: the next `tailrace run {file}` or `tailrace apply {file}` does it")
    return "\n".join(redact(one_line(line)) for line in lines)
