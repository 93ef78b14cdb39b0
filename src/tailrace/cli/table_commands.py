"""Run the commands about single tables: `snapshot`, `retry`, `at`, `evolve` and `rebuild`.

`snapshot` and `retry` only store requests; the applying process does the work.
"""

from __future__ import annotations

import argparse

from tailrace.cli import log_view
from tailrace.cli.log_lines import one_line, redact
from tailrace.cli.output import human_count, human_seconds, print_json, print_out
from tailrace.control import load_requests, rebuild
from tailrace.control.evolution_preview import preview
from tailrace.control.load_requests import LoadRequestResult
from tailrace.control.point_in_time import find_point
from tailrace.control.rebuild import RebuildResult
from tailrace.errors import ConfigError, ExitCode
from tailrace.pipeline.config.settings import PipelineSettings
from tailrace.pipeline.report import TableEvolution
from tailrace.tasks.load_store import LoadHold, LoadMode


def snapshot(settings: PipelineSettings, arguments: argparse.Namespace) -> ExitCode:
    """Store a request to load, pause, resume or stop."""
    holding = arguments.pause or arguments.resume or arguments.stop
    if holding and (arguments.where is not None or arguments.mode is not None):
        raise ConfigError(
            "`--where` and `--mode` cannot be combined with `--pause`, `--resume` or `--stop`",
            hint="Give one or the other.",
        )
    if holding:
        what = LoadHold.PAUSED if arguments.pause else LoadHold.STOPPED if arguments.stop else None
        result = load_requests.hold_loads(settings, arguments.tables, what)
    else:
        mode = LoadMode(arguments.mode or LoadMode.REPLACE.value)
        result = load_requests.request_loads(settings, arguments.tables, mode=mode, where=arguments.where)
    return _print_result(result, arguments)


def retry(settings: PipelineSettings, arguments: argparse.Namespace) -> ExitCode:
    """Store a request to retry failed tables."""
    return _print_result(load_requests.request_retries(settings, arguments.tables), arguments)


def _print_result(result: LoadRequestResult, arguments: argparse.Namespace) -> ExitCode:
    if arguments.json:
        print_json(result.to_json())
    else:
        print_out(request_text(result, arguments.file))
    return ExitCode.OK


def request_text(result: LoadRequestResult, file: str) -> str:
    """Return a line per table, then the process that does it."""
    none = "no table has failed" if result.action == "retry" else "no tables yet"
    lines = [f"{table.name}: {table.said}" for table in result.tables] or [none]
    if result.note:
        lines.append(f"note: {result.note}")
    if any(table.done != "nothing" for table in result.tables):
        if result.apply_pid is not None:
            by = f"process {result.apply_pid}" if result.apply_pid else "the process"
            soon = "a few seconds" if result.action == "retry" else "a second"
            lines.append(f"{by} that applies now starts it within {soon}")
        else:
            lines.append(f"no process applies now: the next `tailrace run {file}` or `tailrace apply {file}` does it")
    return "\n".join(redact(one_line(line)) for line in lines)


def at(settings: PipelineSettings, arguments: argparse.Namespace) -> ExitCode:
    """Show the consistent point, with each table's version there and the tables that have none."""
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


def evolve(settings: PipelineSettings, arguments: argparse.Namespace) -> ExitCode:
    """Show what a run would do to the lake tables; only the pipeline does it."""
    if not arguments.dry_run:
        raise ConfigError(
            "`tailrace evolve` needs `--dry-run`: `tailrace run` and `tailrace apply` evolve tables automatically",
            hint=f"Run `tailrace evolve {arguments.file} --dry-run` to see what they would do.",
        )
    previews = preview(settings)
    if arguments.json:
        print_json({"tables": [table.to_json() for table in previews]})
    elif not previews:
        print_out("no table is loaded yet")
    else:
        print_out("\n".join(map(_line, previews)))
    return ExitCode.OK


def _line(table: TableEvolution) -> str:
    steps = list(table.steps)
    if table.action == "refresh":
        steps.append(f"reload: {table.why}")
    elif table.action == "stop":
        steps.append(f"stop: {table.why}. {table.hint}")
    elif table.why is not None:
        steps.append(f"nothing to do: {table.why}")
    return one_line(f"{table.schema}.{table.table}: {'; '.join(steps) or 'nothing to do'}")


def run_rebuild(settings: PipelineSettings, arguments: argparse.Namespace) -> ExitCode:
    """Rebuild a table, with a progress bar, and print what it was made from."""
    with log_view.progress_bar("replaying", of_bytes=False) as progress:
        done = rebuild.rebuild(
            settings, arguments.table, to=arguments.to, from_version=arguments.from_version, progress=progress
        )
    if arguments.json:
        print_json(done.to_json())
    else:
        print_out(redact(one_line(_text(done))))
    return ExitCode.OK


def _text(done: RebuildResult) -> str:
    base = f"version {done.base_version}" + (", as it was loaded" if done.base == "load" else "")
    if done.base == "seed":
        base = "the kept files of its last load"
    return (
        f"{done.name}: rebuilt from {base} (position {done.base_position}, {human_count(done.base_rows, 'row')}) and "
        f"{human_count(done.changes, 'change')} of the log; it is at {done.position} with "
        f"{human_count(done.rows, 'row')}, as version {done.version} · {human_seconds(done.seconds)}"
    )
