"""Run the `tailrace` command: data to stdout, the rest to stderr, a documented exit code.

A user's mistake ends in an `error:` line and a `hint:` line, never in a traceback. Heavy imports wait for the command
that needs them: `check` and `--help` answer at once, and `capture` never loads Spark. The parser is in
`arguments.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from tailrace.cli import log_lines
from tailrace.cli.arguments import build_parser
from tailrace.cli.output import print_error, print_json, print_out
from tailrace.errors import ConfigError, ExitCode, TailraceError

if TYPE_CHECKING:
    from tailrace.pipeline.config.settings import PipelineSettings
    from tailrace.pipeline.report import Observer, PipelineStatus, Summary


class CommandRunner(Protocol):
    """The work behind the commands.

    Each call blocks until its work is done, reports to the observer meanwhile, and raises a TailraceError when it
    cannot continue.
    """

    def run(
        self, settings: PipelineSettings, *, until_caught_up: bool, observer: Observer, take_over: bool
    ) -> Summary: ...

    def capture(
        self, settings: PipelineSettings, *, until_caught_up: bool, observer: Observer, take_over: bool, child: bool
    ) -> Summary: ...

    def apply(
        self, settings: PipelineSettings, *, until_caught_up: bool, observer: Observer, take_over: bool
    ) -> Summary: ...

    def drop(self, settings: PipelineSettings) -> list[str]: ...

    def read_status(self, settings: PipelineSettings) -> PipelineStatus: ...


class PipelineCommandRunner:
    """The real runner; every method imports what it needs and no more."""

    def run(self, settings: PipelineSettings, *, until_caught_up: bool, observer: Observer, take_over: bool) -> Summary:
        from tailrace.pipeline import runner

        return runner.run(settings, until_caught_up=until_caught_up, observer=observer, take_over=take_over)

    def capture(
        self, settings: PipelineSettings, *, until_caught_up: bool, observer: Observer, take_over: bool, child: bool
    ) -> Summary:
        from tailrace.pipeline import runner

        return runner.capture(
            settings, until_caught_up=until_caught_up, observer=observer, take_over=take_over, child=child
        )

    def apply(
        self, settings: PipelineSettings, *, until_caught_up: bool, observer: Observer, take_over: bool
    ) -> Summary:
        from tailrace.pipeline import runner

        return runner.apply(settings, until_caught_up=until_caught_up, observer=observer, take_over=take_over)

    def drop(self, settings: PipelineSettings) -> list[str]:
        from tailrace.pipeline import runner

        return runner.drop(settings)

    def read_status(self, settings: PipelineSettings) -> PipelineStatus:
        from tailrace.pipeline import status

        return status.read_status(settings)


# ---- commands --------------------------------------------------------------------------------------------


def load_pipeline_settings(file: str) -> PipelineSettings:
    """Load the settings, and hide their passwords in all output from now on."""
    from tailrace.pipeline.config.settings_file import load_settings

    settings = load_settings(file)
    log_lines.hide_passwords_of(settings.source.url)
    if settings.load.standby is not None:
        log_lines.hide_passwords_of(settings.load.standby)
    return settings


def check(arguments: argparse.Namespace) -> ExitCode:
    """Print every problem with its line and remedy; with `--json` they are the data."""
    from tailrace.pipeline.config.settings_file import check_settings

    problems = check_settings(arguments.file)
    if arguments.json:
        print_json(
            {"file": arguments.file, "ok": not problems, "problems": [problem.to_json() for problem in problems]}
        )
    elif not problems:
        print_out(f"{arguments.file}: ok")
    else:
        for problem in problems:
            location = f"{arguments.file}:{problem.line}:{problem.column}" if problem.line else arguments.file
            where = f"`{problem.where}` " if problem.where else ""
            print_error(f"{location}: {where}{problem.message}", problem.hint)
    return ExitCode.CONFIG if problems else ExitCode.OK


def status(arguments: argparse.Namespace, engine: CommandRunner) -> ExitCode:
    """Show the pipeline; a failed table is not a failure of this command."""
    pipeline = engine.read_status(load_pipeline_settings(arguments.file))
    if arguments.json:
        print_json(pipeline.to_json())
        return ExitCode.OK
    from tailrace.cli import status_view

    console = status_view.console_for(stream_is_stderr=False)
    with console.capture() as captured:
        status_view.print_status(pipeline, console)
    print_out("\n".join(line.rstrip() for line in captured.get().rstrip("\n").split("\n")))
    return ExitCode.OK


def drop(arguments: argparse.Namespace, engine: CommandRunner) -> ExitCode:
    """Remove slot and publication at the source, after confirmation."""
    settings = load_pipeline_settings(arguments.file)
    if not arguments.yes and not confirmed(settings):
        print("nothing was removed", file=sys.stderr)
        return ExitCode.INTERRUPTED
    removed = engine.drop(settings)
    if arguments.json:
        print_json({"name": settings.name, "removed": removed})
    else:
        lines = [f"removed {log_lines.one_line(item)}" for item in removed]
        print_out("\n".join(lines) or "nothing to remove")
    return ExitCode.OK


def confirmed(settings: PipelineSettings) -> bool:
    """Return whether the person at the terminal confirms; without a terminal, ask for `--yes`."""
    from tailrace.capture.postgres.connect import redacted_url

    if not sys.stdin or not sys.stdin.isatty():
        raise ConfigError(
            "`tailrace drop` asks for confirmation, and there is no terminal",
            hint="Add `--yes` to remove the slot and publication without confirmation.",
        )
    what = f"the slot and publication that pipeline `{settings.name}` made at {redacted_url(settings.source.url)}"
    print(f"Remove {what}?\nLog and tables stay. [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def run_command(arguments: argparse.Namespace, engine: CommandRunner) -> ExitCode:
    """Run `run`, `capture` or `apply`, show its progress, and print its summary."""
    from tailrace.cli import load_view, status_view
    from tailrace.pipeline.report import tables_exit_code

    settings = load_pipeline_settings(arguments.file)
    until, take_over = arguments.until_caught_up, arguments.take_over
    with status_view.observer_for(quiet=arguments.quiet) as observer:
        if arguments.command == "run":
            summary = engine.run(settings, until_caught_up=until, observer=observer, take_over=take_over)
        elif arguments.command == "apply":
            summary = engine.apply(settings, until_caught_up=until, observer=observer, take_over=take_over)
        else:
            summary = engine.capture(
                settings, until_caught_up=until, observer=observer, take_over=take_over, child=arguments.child
            )
    observer.finished_loads.update(summary.tables)
    loads = observer.finished_loads.finished
    code = summary.exit_code
    if code is ExitCode.OK and until and arguments.command != "capture":
        code = tables_exit_code(summary.tables)
    if arguments.json:
        finished = {"loads": [load_view.done_json(table) for table in loads]} if loads else {}
        print_json({**summary.to_json(), **finished, "exit_code": int(code)})
    elif not arguments.quiet:
        if loads:
            print_out(load_view.loaded_text(loads))
        print_out(status_view.summary_text(summary))
    if not arguments.child:
        print_broken(summary, arguments.file)
    return code


def print_broken(summary: Summary, file: str) -> None:
    """Print an error and a hint for every table that needs a person."""
    for table in summary.tables:
        if table.state.is_blocked:
            detail = f": {table.detail}" if table.detail else ""
            reason = f" [{table.reason}]" if table.reason else ""
            hint = table.hint or f"See `tailrace status {file}` for every table."
            print_error(f"{table.name} is {table.state.value}{detail}{reason}", hint)


# ---- the boundary ----------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None, *, engine: CommandRunner | None = None) -> int:
    """Run one command and return its exit code. Every exception ends here."""
    words = list(sys.argv[1:] if argv is None else argv)
    if sys.stdout and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    arguments = argparse.Namespace(json="--json" in words, child=False, log_level="warning")
    try:
        build_parser().parse_args(words, namespace=arguments)
        if arguments.child:
            # The parent shows progress and errors; it reads both from one JSON object.
            arguments.json = arguments.quiet = True
        log_lines.set_up(arguments.log_level)
        return dispatch(arguments, engine or PipelineCommandRunner())
    except TailraceError as error:
        return fail(error, arguments)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except Exception as error:
        return fail(unexpected(error, arguments), arguments)


def dispatch(arguments: argparse.Namespace, engine: CommandRunner) -> ExitCode:
    """Call the requested command."""
    if arguments.command == "check":
        return check(arguments)
    if arguments.command == "status":
        return status(arguments, engine)
    if arguments.command == "drop":
        return drop(arguments, engine)
    if arguments.command in ("log", "consumers"):
        from tailrace.cli import log_commands

        handle = log_commands.log if arguments.command == "log" else log_commands.consumers
        return handle(load_pipeline_settings(arguments.file), arguments)
    if arguments.command == "schema-history":
        from tailrace.cli import schema_commands
        from tailrace.control.schema_history_view import open_folder_history, open_log_history

        folder = os.path.isdir(arguments.file)
        history = (
            open_folder_history(arguments.file)
            if folder
            else open_log_history(load_pipeline_settings(arguments.file).log.path)
        )
        return schema_commands.schema_history(history, arguments)
    if arguments.command == "checkpoints":
        from tailrace.cli import checkpoint_commands

        return checkpoint_commands.checkpoints(arguments)
    if arguments.command == "tail":
        from tailrace.cli import tail_command

        return tail_command.tail(load_pipeline_settings(arguments.file), arguments)
    if arguments.command == "at":
        from tailrace.cli import table_commands

        return table_commands.at(load_pipeline_settings(arguments.file), arguments)
    if arguments.command == "evolve":
        from tailrace.cli import table_commands

        return table_commands.evolve(load_pipeline_settings(arguments.file), arguments)
    if arguments.command == "rebuild":
        from tailrace.cli import table_commands

        return table_commands.run_rebuild(load_pipeline_settings(arguments.file), arguments)
    if arguments.command == "dead-letters":
        from tailrace.cli import dead_letter_commands

        return dead_letter_commands.dead_letters(load_pipeline_settings(arguments.file), arguments)
    if arguments.command in ("snapshot", "retry"):
        from tailrace.cli import table_commands

        ask = table_commands.snapshot if arguments.command == "snapshot" else table_commands.retry
        return ask(load_pipeline_settings(arguments.file), arguments)
    return run_command(arguments, engine)


def fail(error: TailraceError, arguments: argparse.Namespace) -> ExitCode:
    """Print the error: two lines, and with `--json` one object for a script."""
    if arguments.json:
        from tailrace.pipeline.report import error_to_json

        print_json({"error": error_to_json(error), "exit_code": int(error.exit_code)})
    if not arguments.child:
        print_error(error.headline, error.hint or "Run again with `--log-level debug` for more.")
    return error.exit_code


def unexpected(error: Exception, arguments: argparse.Namespace) -> TailraceError:
    """Return an error for a bug of ours.

    Its text may hold row values, so without level debug only the location is shown.
    """
    if arguments.log_level == "debug":
        with contextlib.suppress(OSError):
            print(log_lines.redact("".join(traceback.format_exception(error))), end="", file=sys.stderr)
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if os.path.abspath(frame.filename).startswith(package + os.sep)]
    at = f" at {os.path.relpath(ours[-1].filename, package)}:{ours[-1].lineno}" if ours else ""
    return TailraceError(
        f"unexpected {type(error).__name__}{at}",
        hint="This is a bug: run again with `--log-level debug` and report what it prints.",
    )


if __name__ == "__main__":
    sys.exit(main())
