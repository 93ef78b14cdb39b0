"""Run `tailrace dead-letters`: list, replay or drop dead letters."""

from __future__ import annotations

import argparse
import json

from tailrace.cli.log_lines import one_line, redact
from tailrace.cli.output import print_json, print_out
from tailrace.control import dead_letter_actions
from tailrace.control.dead_letter_actions import DeadLetterEntry, DeadLetterRequestResult
from tailrace.errors import ConfigError, ExitCode
from tailrace.pipeline.config.settings import PipelineSettings


def dead_letters(settings: PipelineSettings, arguments: argparse.Namespace) -> ExitCode:
    """Run the requested action."""
    _refuse_bad_arguments(arguments)
    if arguments.action == "replay":
        result = dead_letter_actions.request_replay(settings, arguments.tables)
        _print(result, arguments, done="replayed", text=_replay_text(result, arguments.file))
    elif arguments.forget:
        result = dead_letter_actions.forget_dead_letters(settings, arguments.tables, arguments.seq or ())
        _print(result, arguments, done="forgotten", text=_forget_text(result))
    else:
        entries = dead_letter_actions.list_dead_letters(settings, arguments.tables, payload=arguments.payload)
        if arguments.json:
            print_json({"letters": [entry.to_json() for entry in entries]})
        else:
            print_out("\n".join(map(_line, entries)) or "there are no dead letters")
    return ExitCode.OK


def _refuse_bad_arguments(arguments: argparse.Namespace) -> None:
    if arguments.action == "replay" and (arguments.payload or arguments.forget or arguments.seq):
        raise ConfigError(
            "`--payload`, `--forget` and `--seq` go with `list` only",
            hint="For example: `tailrace dead-letters FILE list public.orders --forget --seq 12`.",
        )
    if arguments.seq and not arguments.forget:
        raise ConfigError(
            "`--seq` goes with `--forget` only", hint="Give both: `list` shows every dead letter with its number."
        )


def _print(result: DeadLetterRequestResult, arguments: argparse.Namespace, *, done: str, text: str) -> None:
    if arguments.json:
        tables = [
            {"schema": table.schema, "table": table.name, "letters": count}
            | ({"stopped": result.stopped[table]} if table in result.stopped else {})
            for table, count in result.tables.items()
        ]
        unreplayable = [
            {"schema": table.schema, "table": table.name, "letters": n} for table, n in result.unreplayable.items()
        ]
        print_json({done: tables, "apply_pid": result.apply_pid} | ({"kept": unreplayable} if unreplayable else {}))
    else:
        print_out(redact(text))


def _line(entry: DeadLetterEntry) -> str:
    text = (
        f"{entry.name} · seq {entry.seq} · {entry.operation} at {entry.position} · transaction {entry.transaction}"
        f" · {entry.committed_at} · {entry.cause} [{entry.code}]"
    )
    text += " · later changes of its row were applied" if entry.passed else ""
    payload = "" if entry.payload is None else f" · {json.dumps(entry.payload, ensure_ascii=False)}"
    return one_line(text + payload)


def _replay_text(result: DeadLetterRequestResult, file: str) -> str:
    unreplayable = [
        f"{table}: {_count(count)} cannot be replayed, because the source no longer has the row as it was: see "
        f"`list {table} --payload`, then drop with `list {table} --forget`"
        for table, count in result.unreplayable.items()
    ]
    if not result.tables:
        return "\n".join(map(one_line, unreplayable)) or "there are no dead letters"
    lines = [
        f"{table}: {_count(count)} {'is' if count == 1 else 'are'} replayed"
        + (
            f" once the table, which is {result.stopped[table]}, runs again: see `tailrace status {file}`"
            if table in result.stopped
            else ""
        )
        for table, count in result.tables.items()
    ]
    lines += unreplayable
    if result.apply_pid is not None and len(result.stopped) == len(result.tables):
        return "\n".join(map(one_line, lines))
    if result.apply_pid is not None:
        by = f"process {result.apply_pid}" if result.apply_pid else "the process"
        lines.append(f"{by} that applies now starts it within a few seconds")
    else:
        lines.append(f"no process applies now: the next `tailrace run {file}` or `tailrace apply {file}` does it")
    return "\n".join(map(one_line, lines))


def _forget_text(result: DeadLetterRequestResult) -> str:
    lines = [f"{table}: {_count(count)} dropped; the rows stay as they are" for table, count in result.tables.items()]
    return "\n".join(map(one_line, lines)) or "there are no dead letters"


def _count(count: int) -> str:
    return "1 dead letter" if count == 1 else f"{count:,} dead letters"
