"""Run `tailrace checkpoints`: list, set and delete the checkpoints of a store."""

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
"""Matches the file names of a schema history."""


def checkpoints(arguments: argparse.Namespace) -> ExitCode:
    """Run the requested action.

    Listing works while another process owns the store; the other actions are then refused.
    """
    _refuse_bad_arguments(arguments)
    _refuse_other_folders(arguments.folder)
    if arguments.action == "list":
        checkpoints_by_key = FileCheckpointStore(arguments.folder, read_only=True).all()
        if arguments.json:
            print_json({"checkpoints": [{"key": key} | item.to_json() for key, item in checkpoints_by_key.items()]})
        else:
            print_out(_text(checkpoints_by_key))
        return ExitCode.OK
    if not Path(arguments.folder).is_dir() and arguments.action == "delete":
        raise ConfigError("there is no such folder", folder=arguments.folder, hint="Check the path.")
    with FileCheckpointStore(arguments.folder) as store:
        if arguments.action == "seed":
            checkpoint = Checkpoint.parse(
                source_type=arguments.source, position_type=arguments.type, position=arguments.position
            )
            seed_checkpoint(store, arguments.key, checkpoint)
            message = f"seeded {arguments.key} at {checkpoint.position}"
        elif store.delete(arguments.key):
            message = f"deleted {arguments.key}"
        else:
            raise ConfigError(
                "there is no checkpoint with this key",
                key=arguments.key,
                hint=f"See `tailrace checkpoints {arguments.folder} list` for all keys.",
            )
    if arguments.json:
        print_json({"action": arguments.action, "key": arguments.key})
    else:
        print_out(one_line(message))
    return ExitCode.OK


def _refuse_bad_arguments(arguments: argparse.Namespace) -> None:
    seed_options = [arguments.source, arguments.type, arguments.position]
    is_seed = arguments.action == "seed"
    if (arguments.key is None) != (arguments.action == "list"):
        raise ConfigError(
            "`list` takes no key; `seed` and `delete` need one",
            hint="For example: `tailrace checkpoints FOLDER delete orders`.",
        )
    if any((value is None) == is_seed for value in seed_options):
        raise ConfigError(
            "`seed` needs `--source`, `--type` and `--position`; the other actions do not take them",
            hint="For example: `tailrace checkpoints FOLDER seed orders --source postgresql --type postgresql-lsn "
            "--position 16/B374D848`.",
        )


def _refuse_other_folders(folder: str) -> None:
    """Refuse folders of other stores, instead of reading them as damaged or writing to them."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    if any(_VERSION.fullmatch(name) for name in names):
        raise ConfigError(
            "the folder is a schema history, not a checkpoint store",
            folder=folder,
            hint="See `tailrace schema-history FOLDER` for its contents; a checkpoint store has its own folder.",
        )
    if {"meta.json", "hot"} <= set(names):
        raise ConfigError(
            "the folder is a change log, not a checkpoint store",
            folder=folder,
            hint="See `tailrace log FILE show` for its position: a log stores that itself.",
        )


def _text(checkpoints_by_key: dict[str, Checkpoint]) -> str:
    if not checkpoints_by_key:
        return "there are no checkpoints"
    view = Table(box=SIMPLE_HEAD, pad_edge=False)
    view.add_column("key", overflow="fold", min_width=8)
    for title in ("source", "position", "transaction"):
        view.add_column(title, overflow="fold")
    for title in ("time", "age"):
        view.add_column(title, no_wrap=True)
    for key, item in checkpoints_by_key.items():
        cells = (key, item.source_type, str(item.position), item.transaction or log_view.NONE)
        time = item.time.isoformat(timespec="seconds").replace("+00:00", "Z")
        view.add_row(*(Text(one_line(cell)) for cell in cells), time, human_seconds(item.age_seconds))
    return log_view.render_text(view)
