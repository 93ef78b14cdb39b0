"""`tailrace dead-letters`: show what was set aside, have it tried again, or drop it."""

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
    """Do what was asked for."""
    _refuse_nonsense(arguments)
    if arguments.action == "replay":
        asked = dead_letter_actions.request_replay(settings, arguments.tables)
        _tell(asked, arguments, done="replayed", text=_replay_text(asked, arguments.file))
    elif arguments.forget:
        asked = dead_letter_actions.forget_dead_letters(settings, arguments.tables, arguments.seq or ())
        _tell(asked, arguments, done="forgotten", text=_forget_text(asked))
    else:
        letters = dead_letter_actions.list_dead_letters(settings, arguments.tables, payload=arguments.payload)
        if arguments.json:
            print_json({"letters": [letter.to_json() for letter in letters]})
        else:
            print_out("\n".join(map(_line, letters)) or "there are no dead letters")
    return ExitCode.OK


def _refuse_nonsense(arguments: argparse.Namespace) -> None:
    if arguments.action == "replay" and (arguments.payload or arguments.forget or arguments.seq):
        raise ConfigError(
            "`--payload`, `--forget` and `--seq` go with `list` only",
            hint="For example: `tailrace dead-letters FILE list public.orders --forget --seq 12`.",
        )
    if arguments.seq and not arguments.forget:
        raise ConfigError("`--seq` goes with `--forget` only", hint="`list` shows every letter with its number.")


def _tell(asked: DeadLetterRequestResult, arguments: argparse.Namespace, *, done: str, text: str) -> None:
    if arguments.json:
        tables = [
            {"schema": table.schema, "table": table.name, "letters": count}
            | ({"stopped": asked.stopped[table]} if table in asked.stopped else {})
            for table, count in asked.tables.items()
        ]
        kept = [{"schema": table.schema, "table": table.name, "letters": n} for table, n in asked.unreplayable.items()]
        print_json({done: tables, "apply_pid": asked.apply_pid} | ({"kept": kept} if kept else {}))
    else:
        print_out(redact(text))


def _line(letter: DeadLetterEntry) -> str:
    said = (
        f"{letter.name} · seq {letter.seq} · {letter.operation} at {letter.position} · transaction {letter.transaction}"
        f" · {letter.committed_at} · {letter.cause} [{letter.code}]"
    )
    said += " · its row has gone on without it" if letter.passed else ""
    payload = "" if letter.payload is None else f" · {json.dumps(letter.payload, ensure_ascii=False)}"
    return one_line(said + payload)


def _replay_text(asked: DeadLetterRequestResult, file: str) -> str:
    kept = [
        f"{table}: {_count(count)} cannot be tried again, for the source no longer has the row as it was: look with "
        f"`list {table} --payload`, then drop with `list {table} --forget`"
        for table, count in asked.unreplayable.items()
    ]
    if not asked.tables:
        return "\n".join(map(one_line, kept)) or "there are no dead letters"
    lines = [
        f"{table}: {_count(count)} {'is' if count == 1 else 'are'} tried again"
        + (
            f" once the table, which is {asked.stopped[table]}, goes on: see `tailrace status {file}`"
            if table in asked.stopped
            else ""
        )
        for table, count in asked.tables.items()
    ]
    lines += kept
    if asked.apply_pid is not None and len(asked.stopped) == len(asked.tables):
        return "\n".join(map(one_line, lines))
    if asked.apply_pid is not None:
        by = f"process {asked.apply_pid}" if asked.apply_pid else "the process"
        lines.append(f"{by} that applies now takes it up within a few seconds")
    else:
        lines.append(f"nothing applies now: the next `tailrace run {file}` or `tailrace apply {file}` does it")
    return "\n".join(map(one_line, lines))


def _forget_text(asked: DeadLetterRequestResult) -> str:
    lines = [f"{table}: {_count(count)} dropped; the rows stay as they are" for table, count in asked.tables.items()]
    return "\n".join(map(one_line, lines)) or "there are no dead letters"


def _count(letters: int) -> str:
    return "1 letter" if letters == 1 else f"{letters:,} letters"
