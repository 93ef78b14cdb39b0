"""`tailrace snapshot` and `tailrace retry`: ask for loads, hold them back, have what has failed tried again; then say
what was asked and who does it."""

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


def run_rebuild(settings: PipelineSettings, arguments: argparse.Namespace) -> ExitCode:
    """Do it, with a bar on the way."""
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
        base = "the seed kept of its last load"
    return (
        f"{done.name}: rebuilt from {base} (position {done.base_position}, {human_count(done.base_rows, 'row')}) and "
        f"{human_count(done.changes, 'change')} of the log; it stands at {done.position} with "
        f"{human_count(done.rows, 'row')}, as version {done.version} · {human_seconds(done.seconds)}"
    )
