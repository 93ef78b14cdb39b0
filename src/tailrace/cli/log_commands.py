"""Run `tailrace log` and `tailrace consumers`, and show the results."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from tailrace.cli import log_view
from tailrace.cli.output import print_error, print_json, print_out
from tailrace.control import log_actions
from tailrace.errors import ConfigError, ExitCode
from tailrace.pipeline.config.setting_values import InvalidQuantity, parse_duration
from tailrace.pipeline.config.settings import PipelineSettings


def log(settings: PipelineSettings, arguments: argparse.Namespace) -> ExitCode:
    """Show the log, or act on it by hand."""
    older_than = _older_than(arguments)
    path, policy = settings.log.path, settings.log.maintenance_policy
    if arguments.action == "show":
        overview = log_actions.read_overview(path)
        _print(arguments, overview.to_json(), lambda: log_view.log_text(overview))
    elif arguments.action == "schemas":
        versions = log_actions.read_schema_versions(path)
        data = {"versions": [version.to_json() for version in versions]}
        _print(arguments, data, lambda: log_view.versions_text(versions))
    elif arguments.action == "verify":
        return _verify(settings, arguments)
    elif arguments.action == "seal":
        with log_view.progress_bar("sealing", of_bytes=False) as progress:
            sealed = log_actions.seal(path, grace_seconds=policy.grace_seconds, progress=progress)
        _print(arguments, sealed.to_json(), lambda: log_view.sealed_text(sealed))
    else:
        trimmed = log_actions.trim(path, policy.retention, older_than_seconds=older_than)
        _print(arguments, trimmed.to_json(), lambda: log_view.trim_text(trimmed, arguments.file))
    return ExitCode.OK


def _verify(settings: PipelineSettings, arguments: argparse.Namespace) -> ExitCode:
    with log_view.progress_bar("verifying", of_bytes=True) as progress:
        result = log_actions.verify(settings.log.path, progress)
    _print(arguments, result.to_json(), lambda: log_view.verdict_text(result))
    if not arguments.json:
        for problem in result.problems:
            print_error(f"{problem.path}: {problem.message}", problem.hint)
        if result.problems_total > len(result.problems):
            more = result.problems_total - len(result.problems)
            print_error(f"and {more:,} more problems", "Fix the listed ones first, then verify again.")
    return ExitCode.OK if result.ok else ExitCode.LOG


def consumers(settings: PipelineSettings, arguments: argparse.Namespace) -> ExitCode:
    """Show the readers that the log keeps rows for, or forget one of them."""
    path = settings.log.path
    if arguments.forget is not None:
        log_actions.forget_consumer(path, arguments.forget)
        _print(arguments, {"forgotten": arguments.forget}, lambda: f"forgot consumer {arguments.forget}")
        return ExitCode.OK
    readers = log_actions.readers(path)
    _print(arguments, {"consumers": [reader.to_json() for reader in readers]}, lambda: log_view.readers_text(readers))
    return ExitCode.OK


def _print(arguments: argparse.Namespace, data: dict[str, Any], text: Callable[[], str]) -> None:
    if arguments.json:
        print_json(data)
    else:
        print_out(text())


def _older_than(arguments: argparse.Namespace) -> float | None:
    if arguments.older_than is None:
        return None
    if arguments.action != "trim":
        raise ConfigError(
            "`--older-than` goes with `trim` only", hint="For example: `tailrace log FILE trim --older-than 2d`."
        )
    try:
        return parse_duration(arguments.older_than)
    except InvalidQuantity as refused:
        raise ConfigError(f"`--older-than` {refused}", hint=refused.hint) from None
