"""`tailrace checkpoints`: look at a store of checkpoints, give one by hand, or take one away."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from tailrace.cli import log_view
from tailrace.cli.log_lines import one_line
from tailrace.cli.output import human_seconds, print_json, print_out
from tailrace.errors import ConfigError, ExitCode
from tailrace.state.checkpoint import Checkpoint, seed_checkpoint
from tailrace.state.checkpoint_stores import FileCheckpointStore

_VERSION = re.compile(r"[0-9a-f]{32}\.[0-9]+\.json")
"""How a schema history calls its files."""


def checkpoints(arguments: argparse.Namespace) -> ExitCode:
    """Do what was asked for. Listing works beside a running owner; the others are refused then."""
    _refuse_nonsense(arguments)
    _refuse_other_folders(arguments.folder)
    if arguments.action == "list":
        found = FileCheckpointStore(arguments.folder, read_only=True).all()
        if arguments.json:
            print_json({"checkpoints": [{"key": key} | item.to_json() for key, item in found.items()]})
        else:
            print_out(_text(found))
        return ExitCode.OK
    if not Path(arguments.folder).is_dir() and arguments.action == "delete":
        raise ConfigError("there is no such folder", folder=arguments.folder, hint="Check the path.")
    with FileCheckpointStore(arguments.folder) as store:
        if arguments.action == "seed":
            given = Checkpoint.parse(
                source_type=arguments.source, position_type=arguments.type, position=arguments.position
            )
            seed_checkpoint(store, arguments.key, given)
            said = f"seeded {arguments.key} at {given.position}"
        elif store.delete(arguments.key):
            said = f"deleted {arguments.key}"
        else:
            raise ConfigError(
                "there is no checkpoint of this key",
                key=arguments.key,
                hint=f"`tailrace checkpoints {arguments.folder} list` shows all.",
            )
    if arguments.json:
        print_json({"action": arguments.action, "key": arguments.key})
    else:
        print_out(one_line(said))
    return ExitCode.OK


def _refuse_nonsense(arguments: argparse.Namespace) -> None:
    given = [arguments.source, arguments.type, arguments.position]
    seeds = arguments.action == "seed"
    if (arguments.key is None) != (arguments.action == "list"):
        raise ConfigError(
            "`list` takes no key, and `seed` and `delete` take one",
            hint="For example: `tailrace checkpoints FOLDER delete orders`.",
        )
    if any((value is None) == seeds for value in given):
        raise ConfigError(
            "`seed` needs `--source`, `--type` and `--position`, and nothing else takes them",
            hint="For example: `tailrace checkpoints FOLDER seed orders --source postgresql --type postgresql-lsn "
            "--position 16/B374D848`.",
        )


def _refuse_other_folders(folder: str) -> None:
    """What is another's is neither read as damaged nor written to."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    if any(_VERSION.fullmatch(name) for name in names):
        raise ConfigError(
            "the folder is a schema history, and no checkpoint store",
            folder=folder,
            hint="`tailrace schema-history FOLDER` shows what it has; a checkpoint store has its own folder.",
        )
    if {"meta.json", "hot"} <= set(names):
        raise ConfigError(
            "the folder is a change log, and no checkpoint store",
            folder=folder,
            hint="It keeps its place itself: `tailrace log FILE show` tells it.",
        )


def _text(found: dict[str, Checkpoint]) -> str:
    if not found:
        return "there are no checkpoints"
    view = Table(box=SIMPLE_HEAD, pad_edge=False)
    view.add_column("key", overflow="fold", min_width=8)
    for title in ("source", "position", "transaction"):
        view.add_column(title, overflow="fold")
    for title in ("time", "age"):
        view.add_column(title, no_wrap=True)
    for key, item in found.items():
        cells = (key, item.source_type, str(item.position), item.transaction or log_view.NONE)
        time = item.time.isoformat(timespec="seconds").replace("+00:00", "Z")
        view.add_row(*(Text(one_line(cell)) for cell in cells), time, human_seconds(item.age_seconds))
    return log_view.render_text(view)
