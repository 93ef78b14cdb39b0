"""Define the commands, actions and flags of the `tailrace` command.

Nothing here prints or exits, apart from `--help` and `--version`: a wrong argument is a ConfigError with a hint. The
parser imports nothing of the pipeline, so help and wrong arguments are answered at once.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Collection, Sequence
from typing import NoReturn

from tailrace.cli import log_lines
from tailrace.cli.output import print_out
from tailrace.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """A parser that raises where argparse would print and exit, so all errors look alike."""

    def error(self, message: str) -> NoReturn:
        hint = f"See `{self.prog} --help` for its arguments."
        if wrong := re.search(r"COMMAND: invalid choice: '([^']*)'", message):
            close = difflib.get_close_matches(wrong.group(1), COMMANDS, n=1)
            message = f"`{wrong.group(1)}` is not a command"
            hint = f"Did you mean `tailrace {close[0]}`?" if close else f"Use one of {', '.join(COMMANDS)}."
        elif "required: ACTION" in message:
            hint = f"Give an action: {' or '.join(_ACTIONS[self.prog.rpartition(' ')[2]])}. {hint}"
        raise ConfigError(message, hint=hint)

    def parse_known_args(  # type: ignore[override] # argparse overloads it; we pass on all arguments
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Accept tables behind a flag too, which argparse does not.

        The command refuses other leftovers itself, because its own help is the useful one.
        """
        parsed, rest = super().parse_known_args(args, namespace)
        if self.prog.endswith((" snapshot", " retry", " dead-letters", " tail")):
            parsed.tables = [*parsed.tables, *(word for word in rest if not word.startswith("-"))]
            rest = [word for word in rest if word.startswith("-")]
        if rest and " " in self.prog:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return parsed, rest


class _VersionAction(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib import metadata

        try:
            version = metadata.version("tailrace")
        except metadata.PackageNotFoundError:
            version = "(not installed: runs from its sources)"
        print_out(f"tailrace {version}")
        parser.exit()


COMMANDS = {
    "run": "run the whole pipeline: capture, load and apply",
    "capture": "copy the source's changes into the log; needs no Spark and no Java",
    "apply": "load tables and apply the log to them, with Spark",
    "status": "show tables, positions, rows and lag",
    "snapshot": "reload tables, or pause, resume or stop loads; works whether the pipeline runs or not",
    "retry": "retry failed tables without a restart",
    "dead-letters": "list, replay or drop changes that a lake table could not take",
    "rebuild": "rebuild a lake table from one of its versions and the log; does not read the source",
    "evolve": "show what `run` would do to lake tables after schema changes at the source",
    "at": "show which versions of the lake tables belong together at a time or position",
    "tail": "print new changes in the log, one line each; does not read the source",
    "log": "show, verify, seal or trim the change log, or show its schemas; does not read the source",
    "schema-history": "show the history of table schemas: created, changed, dropped; does not read the source",
    "checkpoints": "show the checkpoints of your own program, set one by hand, or delete one",
    "consumers": "show the readers that the log keeps rows for, or forget one",
    "check": "check the settings file, offline",
    "drop": "remove the slot and publication at the source; log and tables stay",
}


_CAUGHT_UP = {
    "run": "end once every table is live and has all changes committed before the start",
    "capture": "end once the log has all changes committed before the start",
    "apply": "end once all changes in the log at the start are applied",
}
_LOG_ACTIONS = {
    "show": "its contents and its size",
    "schemas": "every version of every table's schema, and what changed",
    "verify": "check every checksum and count",
    "seal": "turn commits into Parquet files now",
    "trim": "remove now what no reader needs",
}
_ACTIONS: dict[str, Collection[str]] = {
    "log": _LOG_ACTIONS, "dead-letters": ("list", "replay"), "checkpoints": ("list", "seed", "delete"),
}  # fmt: skip
_TAKE_OVER = "take log and slot from a process that hangs; if it wakes, it ends"


def build_parser() -> Parser:
    """Return the parser with all commands and flags, as docs/reference/cli.md lists them."""
    about = "Change data capture on Spark: every committed change of a database, in lake tables."
    parser = Parser(prog="tailrace", allow_abbrev=False, description=about)
    parser.add_argument("--version", action=_VersionAction, nargs=0, help="print the version and exit")
    _add_log_level(parser, "warning")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, description in COMMANDS.items():
        command = commands.add_parser(name, help=description, description=description, allow_abbrev=False)
        if name == "checkpoints":
            command.add_argument("folder", metavar="FOLDER", help="folder of the FileCheckpointStore")
        else:
            command.add_argument("file", metavar="FILE", help="the settings file, e.g. tailrace.yaml")
        objects = "a JSON object for each change" if name == "tail" else "one JSON object"
        command.add_argument("--json", action="store_true", help=f"print {objects} on stdout")
        # The flag may be before or after the command; a default here would overwrite the one before.
        _add_log_level(command, argparse.SUPPRESS)
        if name in _CAUGHT_UP:
            command.add_argument("--until-caught-up", action="store_true", help=_CAUGHT_UP[name])
            command.add_argument("--take-over", action="store_true", help=_TAKE_OVER)
            command.add_argument("--quiet", action="store_true", help="show no progress and no summary")
        if name == "capture":
            command.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
        if name == "tail":
            _add_tail(command)
        if name in ("snapshot", "retry", "tail"):
            command.add_argument(
                "tables",
                metavar="TABLE",
                nargs="*",
                default=[],
                help='schema.table or a pattern, e.g. "public.order_*"',
            )
        if name == "snapshot":
            _add_snapshot(command)
        if name == "rebuild":
            command.add_argument("table", metavar="TABLE", help="schema.table")
            command.add_argument("--to", metavar="LSN", help="rebuild as of this position; default: the end of the log")
            command.add_argument(
                "--from-version",
                metavar="NUMBER",
                type=int,
                help="start from this version, not from the newest usable one",
            )
        if name == "dead-letters":
            _add_dead_letters(command)
        if name == "evolve":
            command.add_argument("--dry-run", action="store_true", help="only show; required")
        if name == "at":
            command.add_argument(
                "--time", metavar="TIME", help="the last point up to this time, e.g. 2026-11-16T12:00:00Z"
            )
            command.add_argument("--position", metavar="LSN", help="the last point up to this position, e.g. 0/15E3F70")
        if name == "log":
            actions = "; ".join(f"{action}: {what}" for action, what in _LOG_ACTIONS.items())
            command.add_argument("action", metavar="ACTION", choices=_ACTIONS["log"], help=actions)
            command.add_argument(
                "--older-than", metavar="AGE", help="trim: remove rows older than this, instead of the settings' age"
            )
        if name == "schema-history":
            command.add_argument("table", metavar="TABLE", nargs="?", help="schema.table; default: all")
        if name == "checkpoints":
            _add_checkpoints(command)
        if name == "consumers":
            command.add_argument("--forget", metavar="NAME", help="keep no more rows for this consumer")
        if name == "drop":
            command.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    return parser


def _add_snapshot(command: argparse.ArgumentParser) -> None:
    command.add_argument("--where", metavar="SQL", help="reload only rows that match this condition; the others stay")
    command.add_argument(
        "--mode",
        choices=("replace", "refresh"),
        help="replace all files (default), or write only files with changed rows",
    )
    holds = command.add_mutually_exclusive_group()
    holds.add_argument("--pause", action="store_true", help="start no new chunks; without TABLE, of all tables")
    holds.add_argument("--resume", action="store_true", help="continue paused loads, and allow stopped ones again")
    holds.add_argument("--stop", action="store_true", help="cancel loads; a loaded table continues as before")


def _add_tail(command: argparse.ArgumentParser) -> None:
    command.add_argument("--from-start", action="store_true", help="start with the oldest change in the log")
    command.add_argument("--until-caught-up", action="store_true", help="end once all changes in the log are printed")
    command.add_argument("--debezium", action="store_true", help="print each change as Debezium's connectors write it")


def _add_dead_letters(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "action",
        metavar="ACTION",
        choices=_ACTIONS["dead-letters"],
        help="list: show them; replay: refetch their rows from the source and write them into the tables",
    )
    command.add_argument(
        "tables", metavar="TABLE", nargs="*", default=[], help="schema.table or a pattern; default: all"
    )
    command.add_argument("--payload", action="store_true", help="list: show the rows' values too")
    command.add_argument("--forget", action="store_true", help="list: drop the listed dead letters; needs TABLE")
    command.add_argument(
        "--seq", metavar="NUMBER", type=int, action="append", help="with --forget: only this dead letter"
    )


def _add_checkpoints(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "action",
        metavar="ACTION",
        choices=_ACTIONS["checkpoints"],
        help="list: show them; seed: save the first checkpoint of a key; delete: remove one",
    )
    command.add_argument("key", metavar="KEY", nargs="?", help="seed, delete: key of the checkpoint")
    command.add_argument(
        "--source", metavar="TYPE", help="seed: kind of source: postgresql, mysql, mariadb, sqlserver, or your own"
    )
    command.add_argument("--type", metavar="TYPE", help="seed: type of position, e.g. postgresql-lsn or mysql-gtid")
    command.add_argument("--position", metavar="TEXT", help="seed: position that the sink surely has, e.g. 16/B374D848")


def _add_log_level(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--log-level",
        choices=log_lines.LEVELS,
        default=default,
        help="lowest level that is logged to stderr (default: warning)",
    )
