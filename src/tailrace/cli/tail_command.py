"""Run `tailrace tail`: print the changes in the log as they arrive, one line each.

Only the log is read: the source is not asked, and no running process is disturbed. Nothing is stored about the reader,
so the log keeps nothing for it. Commits that were trimmed before they were printed, and gaps of the log, are reported
on stderr. The command ends when stdout has no reader any more (`| head`), even if no change arrives.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import heapq
import itertools
import json
import logging
from collections.abc import Callable, Iterator

from tailrace.changelog.read.reader import ChangeLog
from tailrace.cli.log_lines import one_line
from tailrace.cli.output import wait_while_read, write_out
from tailrace.errors import ConfigError, ExitCode, LogTrimmed
from tailrace.model.change import Operation
from tailrace.model.event import Event, Row
from tailrace.model.event_json import to_debezium_line, to_json, to_json_line
from tailrace.pipeline.config.settings import PipelineSettings
from tailrace.pipeline.config.source_settings import is_named

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.1
"""Seconds between two looks for a new commit."""
LINES_AT_ONCE = 1000
_WIDTH = max(len(operation.value) for operation in Operation)


def tail(settings: PipelineSettings, arguments: argparse.Namespace) -> ExitCode:
    """Print changes until interrupted or, with `--until-caught-up`, up to the log's end."""
    if arguments.debezium and arguments.json:
        raise ConfigError(
            "`--json` and `--debezium` cannot be combined", hint="Choose one: each sets the format of a line."
        )
    log = ChangeLog.open(settings.log.path)
    _require_known(log, arguments.tables)
    encode = to_debezium_line if arguments.debezium else to_json_line if arguments.json else line
    done = log.trimmed().commit if arguments.from_start else log.newest()
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            newest = log.newest()
            gaps = {gap.commit: gap.error for gap in log.gaps() if done < gap.commit <= newest}
            trimmed: list[int] = []
            for commit in range(done + 1, newest + 1):
                if (gap := gaps.get(commit)) is not None:
                    logger.warning(gap.message, extra=dict(gap.fields))
                try:
                    events = _events(log, commit, arguments.tables)
                except LogTrimmed:
                    trimmed.append(commit)
                    continue
                _warn_of_trimmed(trimmed)
                if not _print(events, encode):
                    return ExitCode.OK
            _warn_of_trimmed(trimmed)
            done = max(done, newest)
            if arguments.until_caught_up or not wait_while_read(LOOK_SECONDS):
                break
    return ExitCode.OK


def _require_known(log: ChangeLog, tables: list[str]) -> None:
    """Refuse names that cannot be a table's; warn of those without rows in the log."""
    log.schemas.load()
    for name in tables:
        if "." not in name:
            raise ConfigError(
                "the table name lacks its schema",
                table=name,
                hint=f"Write `public.{name}`, or `*.{name}` for any schema.",
            )
        if not log.schemas.numbers_matching(functools.partial(is_named, name)):
            logger.warning(
                "the log has no rows of this table yet",
                extra={"table": name, "hint": "See `tailrace log FILE show` for its tables; names are case-sensitive."},
            )


def _events(log: ChangeLog, commit: int, tables: list[str]) -> Iterator[Event]:
    """Yield the changes of one commit, in order."""
    batches = [
        batch
        for batch in log.read(commit, commit)
        if not tables or any(is_named(name, batch.schema.table) for name in tables)
    ]
    return heapq.merge(*(batch.events() for batch in batches), key=lambda event: event.seq)


def _warn_of_trimmed(commits: list[int]) -> None:
    """Warn once of commits that were trimmed before they were read: the reader was slow."""
    if commits:
        hint = "Read faster, or keep more rows with `log.retention`."
        fields = {"first": commits[0], "last": commits[-1], "hint": hint}
        logger.warning("commits were trimmed before they were printed", extra=fields)
        commits.clear()


def _print(events: Iterator[Event], encode: Callable[[Event], str]) -> bool:
    """Print the events; return whether stdout still has a reader."""
    while lines := [encode(event) + "\n" for event in itertools.islice(events, LINES_AT_ONCE)]:
        if not write_out("".join(lines)):
            return False
    return True


def line(event: Event) -> str:
    """Return a change for people: time, operation, table, row.

    Texts are quoted, so that none can control a terminal.
    """
    at = event.committed_at.strftime("%Y-%m-%dT%H:%M:%SZ") if event.committed_at else "-"
    words = [at, event.operation.value.ljust(_WIDTH), one_line(event.table)]
    shown = to_json(event)
    if event.operation is Operation.DELETE:
        words.append(_columns(shown.get("before", {})))
    elif event.after is not None:
        words.append(_columns(shown["after"]))
    if event.unchanged:
        words.append(f"(unchanged: {', '.join(map(one_line, event.unchanged))})")
    if event.moved_from is not None:
        words.append(f"(was {_columns(shown['moved_from'])})")
    if event.unfit:
        words.append(f"(does not fit: {', '.join(map(one_line, event.unfit))})")
    return " ".join(words)


def _columns(row: Row) -> str:
    return " ".join(f"{one_line(name)}={json.dumps(value)}" for name, value in row.items())
