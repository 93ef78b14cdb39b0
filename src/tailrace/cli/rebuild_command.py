"""`tailrace rebuild`: make a lake table anew, and say from what."""

from __future__ import annotations

import argparse

from tailrace.cli import log_view
from tailrace.cli.log_lines import one_line, redact
from tailrace.cli.output import print_json, print_out
from tailrace.cli.units import human_count, human_seconds
from tailrace.control import rebuild
from tailrace.control.rebuild import RebuildResult
from tailrace.errors import ExitCode
from tailrace.pipeline.config.settings import PipelineSettings


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
