"""`tailrace tail`: the changes in the log as they come, a line each, for people and for pipes.

Only the log is read: the source is not asked, and whatever runs beside it is not disturbed. Nothing is remembered, so
nothing is kept for it: what went before it was printed, and what the log itself lacks, is told beside the data. When
nobody reads any more (`| head`) it ends, also while nothing comes.
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
from tailrace.pipeline.config.settings import PipelineSettings, is_named

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.1
"""Between two looks for a new commit."""
LINES_AT_ONCE = 1000
_WIDTH = max(len(operation.value) for operation in Operation)


def tail(settings: PipelineSettings, arguments: argparse.Namespace) -> ExitCode:
    """Print changes until told to stop or, with `--until-caught-up`, until all that is there was printed."""
    if arguments.debezium and arguments.json:
        raise ConfigError("`--json` and `--debezium` do not go together", hint="Choose one: each is a form of a line.")
    log = ChangeLog.open(settings.log.path)
    _require_known(log, arguments.tables)
    encode = to_debezium_line if arguments.debezium else to_json_line if arguments.json else line
    done = log.trimmed().commit if arguments.from_start else log.newest()
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            newest = log.newest()
            gaps = {gap.commit: gap.error for gap in log.gaps() if done < gap.commit <= newest}
            gone: list[int] = []
            for commit in range(done + 1, newest + 1):
                if (gap := gaps.get(commit)) is not None:
                    logger.warning(gap.message, extra=dict(gap.fields))
                try:
                    events = _events(log, commit, arguments.tables)
                except LogTrimmed:
                    gone.append(commit)
                    continue
                _tell_gone(gone)
                if not _print(events, encode):
                    return ExitCode.OK
            _tell_gone(gone)
            done = max(done, newest)
            if arguments.until_caught_up or not wait_while_read(LOOK_SECONDS):
                break
    return ExitCode.OK


def _require_known(log: ChangeLog, tables: list[str]) -> None:
    """Refuse names that can never be a table's; warn of those that are none's now."""
    log.schemas.load()
    for name in tables:
        if "." not in name:
            raise ConfigError(
                "a table's name has its schema",
                table=name,
                hint=f"Write `public.{name}`, or `*.{name}` for any schema.",
            )
        if not log.schemas.numbers_matching(functools.partial(is_named, name)):
            logger.warning(
                "the log has no rows of such a table yet",
                extra={"table": name, "hint": "`tailrace log FILE show` lists those it has; case counts."},
            )


def _events(log: ChangeLog, commit: int, tables: list[str]) -> Iterator[Event]:
    """The changes of one commit, in order."""
    batches = [
        batch
        for batch in log.read(commit, commit)
        if not tables or any(is_named(name, batch.schema.table) for name in tables)
    ]
    return heapq.merge(*(batch.events() for batch in batches), key=lambda event: event.seq)


def _tell_gone(commits: list[int]) -> None:
    """Say which were let go of between the look and the reading, once: whoever reads was slow."""
    if commits:
        hint = "Have them printed faster, or keep more: `log.retention`."
        said = {"first": commits[0], "last": commits[-1], "hint": hint}
        logger.warning("commits were trimmed before they were printed", extra=said)
        commits.clear()


def _print(events: Iterator[Event], encode: Callable[[Event], str]) -> bool:
    """Whether somebody still reads."""
    while lines := [encode(event) + "\n" for event in itertools.islice(events, LINES_AT_ONCE)]:
        if not write_out("".join(lines)):
            return False
    return True


def line(event: Event) -> str:
    """For people: when, what, where, the row. Texts are quoted, so that none can steer a terminal."""
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
