"""Read the settings file, and list every mistake in it with its line and remedy.

Loading and checking read the file the same way, so a file that checks clean loads. A value that could be a secret
appears in no error and in no problem.

The file is read in steps: bytes → YAML nodes with line numbers → plain values with variables replaced (`document.py`) →
the models (`settings.py`), whose values `setting_values.py` checks.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from tailrace.errors import ConfigError
from tailrace.pipeline.config import catalog_settings, transform_settings
from tailrace.pipeline.config.catalog_settings import CatalogSettings
from tailrace.pipeline.config.document import Document, Loc, Problem, dotted, read_text
from tailrace.pipeline.config.setting_values import LoadModeName, MetadataName, check_folder
from tailrace.pipeline.config.settings import (
    OVERLAP_HINT,
    EvolutionSettings,
    LoadSettings,
    LogSettings,
    PipelineSettings,
    RetentionSettings,
    SealSettings,
    SparkSettings,
    TableRuleSettings,
    TablesSettings,
    UpkeepSettings,
    anchored_paths,
    folder_overlap,
)
from tailrace.pipeline.config.source_settings import PublicationSettings, SlotSettings, SourceSettings
from tailrace.transforms.rules import Transforms


def load_settings(path: str | Path, environment: Mapping[str, str] = os.environ) -> PipelineSettings:
    """Return the settings of a file, or raise ConfigError.

    The error has the first problem and the number of others.
    """
    settings, problems = _examine(Path(path), environment)
    if settings is not None:
        return settings
    first = problems[0]
    location = f"{path}:{first.line}: " if first.line else f"{path}: "
    message = location + (f"`{first.where}` " if first.where else "") + first.message
    if len(problems) > 1:
        message += f" (and {len(problems) - 1} more problem{'s' if len(problems) > 2 else ''})"
    more = f" `tailrace check {path}` lists every problem." if first.line else ""
    raise ConfigError(message, hint=first.hint + more)


def check_settings(path: str | Path, environment: Mapping[str, str] = os.environ) -> list[Problem]:
    """Return every problem that the file alone shows, by line; empty if it is usable."""
    return _examine(Path(path), environment)[1]


def _examine(file: Path, environment: Mapping[str, str]) -> tuple[PipelineSettings | None, list[Problem]]:
    text = read_text(file)
    document = _SettingsDocument(environment, needs=_EXAMPLES[""], urls=_URLS)
    if isinstance(text, Problem):
        return None, [text]
    document.parse(text)
    settings = None
    if isinstance(document.data, dict):
        if "file" in document.data:
            document.add_unknown_key(("file",))
        try:
            settings = PipelineSettings.model_validate({**document.data, "file": file})
        except ValidationError as error:
            for detail in error.errors(include_url=False, include_input=False):
                document.add_refusal(detail)
            document.add_overlap(file)
    problems = sorted(document.problems, key=lambda problem: (problem.line, problem.column))
    return (None if problems else settings), problems


_MODELS: dict[Loc, type[BaseModel]] = {
    (): PipelineSettings,
    ("source",): SourceSettings,
    ("source", "slot"): SlotSettings,
    ("source", "publication"): PublicationSettings,
    ("log",): LogSettings,
    ("log", "retention"): RetentionSettings,
    ("log", "seal"): SealSettings,
    ("tables",): TablesSettings,
    ("tables", "catalog"): CatalogSettings,
    ("tables", "evolution"): EvolutionSettings,
    ("tables", "upkeep"): UpkeepSettings,
    ("load",): LoadSettings,
    ("spark",): SparkSettings,
    ("transforms",): Transforms,
}

_UNSUPPORTED_KEYS: dict[Loc, str] = {
    ("source", "type"): "Remove it: the scheme of `url` says what the source is, e.g. `postgresql://…`."
}
"""Keys that people expect and that do not exist."""
_URLS: tuple[Loc, ...] = (("source", "url"), ("load", "standby"))
_MODES = ", ".join(get_args(LoadModeName))
_EXAMPLES = {
    "": "name, source, log and tables; docs/reference/configuration.md has an example",
    "name": "`name: shop`",
    "source": "`source:` and below it, indented, `url:` and `tables:`",
    "source.url": "`url: postgresql://user:${PGPASSWORD}@host:5432/database`",
    "source.tables": '`tables: ["public.*"]`',
    "source.exclude": '`exclude: ["public.audit_*"]`',
    "source.messages": '`messages: ["orders", "mail-*"]`',
    "source.origin": "`origin: any`, or `origin: none`",
    "source.invalid_text": "`invalid_text: refuse`, or `invalid_text: replace`",
    "source.slot": "`slot: {name: tailrace_shop, create: true}`",
    "source.publication": "`publication: {name: tailrace_shop, create: true}`",
    "log": "`log: ./shop/changes`",
    "log.retention": "`retention: {age: 7d, bytes: 20GB}`",
    "log.seal": "`seal: {bytes: 128MiB, commits: 4096, age: 10min}`",
    "tables": "`tables:` and below it, indented, `format: delta` and `path:`",
    "tables.format": "`format: delta`, or `format: iceberg`",
    "tables.engine": "`engine: delta-rs`, or `engine: spark`",
    "tables.path": "`path: ./shop/lake`",
    "tables.mode": "`mode: mirror`, `mode: history` or `mode: append`",
    "tables.soft_delete": "`soft_delete: true`",
    "tables.metadata": f"`metadata: [_seq, _op]`; known are {', '.join(get_args(MetadataName))}",
    "tables.partition_by": "`partition_by: [region]`",
    "tables.names": '`names: "{pipeline}/{schema}/{table}"`',
    "tables.name": "`name: gold/sales`",
    "tables.columns": "`columns: {cust: customer_id}`",
    "tables.rules": '`rules: {"public.orders": {mode: history}, "public.log_*": {mode: append}}`',
    "tables.evolution": "`evolution: {drop: apply, retype: stop}`",
    "tables.upkeep": "`upkeep: {file: 128MiB, budget: 10%, remove_after: 7d}`",
    "tables.on_bad_row": "`on_bad_row: stop`, or `on_bad_row: dead-letter`",
    "tables.keep_seed": "`keep_seed: true`, `keep_seed: false` or `keep_seed: copy`",
    "tables.deletion_vectors": "`deletion_vectors: true`, with `engine: spark`",
    "tables.column_mapping": "`column_mapping: true`, with `engine: spark`",
    "load": "`load: {connections: 4, time_limit: 1h}`",
    "load.mode": f"`mode: initial`; known are {_MODES}",
    "load.modes": f'`modes: {{"public.audit_*": never}}`; known are {_MODES}',
    "load.way": "`way: auto`, `way: exact` or `way: chunked`",
    "load.throttle": "`throttle: false`",
    "load.standby": "`standby: postgresql://user:${PGPASSWORD}@standby:5432/database`",
    "spark": "`spark: {settings: {spark.driver.memory: 2g}}`",
    "spark.master": '`master: "local[4]"`',
    "spark.settings": "`settings: {spark.driver.memory: 2g}`",
    **catalog_settings.EXAMPLES,
    **transform_settings.EXAMPLES,
}

_PYDANTIC_TEXTS = {
    "string_type": "must be text",
    "path_type": "must be the path of a folder",
    "tuple_type": "must be a list",
    "too_short": "must not be empty",
    "string_too_short": "must not be empty",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "literal_error": "has an unknown value",
    "model_type": "must be a mapping",
    "dict_type": "must be a mapping",
    "model_attributes_type": "must be a mapping",
}
"""Our text for pydantic's own errors, except those of rules; others keep pydantic's text."""


def _keys(loc: Loc) -> list[str]:
    of_rule = loc[3:] if loc[:2] == ("tables", "rules") and len(loc) >= 3 else None
    model = TableRuleSettings if of_rule == () else _MODELS.get(loc if of_rule is None else ("tables", *of_rule))
    fields = model.model_fields.items() if model else ()
    return [field.alias or name for name, field in fields if (model, name) != (PipelineSettings, "file")]


def _example(loc: Loc) -> str:
    if loc[:2] == ("tables", "rules") and loc[3:] and dotted(("tables", *loc[3:4])) in _EXAMPLES:
        loc = ("tables", *loc[3:4])  # a rule takes the keys of `tables`
    while dotted(loc) not in _EXAMPLES:
        loc = loc[:-1]
    return f"For example: {_EXAMPLES[dotted(loc)]}."


def _folder_of(holder: object) -> Path | None:
    try:
        folder = check_folder(holder.get("path")) if isinstance(holder, dict) else None
    except PydanticCustomError:
        return None
    return folder if isinstance(folder, Path) else None


class _SettingsDocument(Document):
    """A document with the problems that the models find."""

    def add_unknown_key(self, loc: Loc) -> None:
        *parent, key = loc
        known = transform_settings.keys_of(tuple(parent), self.value(tuple(parent))) or _keys(tuple(parent))
        close = difflib.get_close_matches(str(key), known, n=1)
        homes = [f"under `{dotted(home)}`" if home else "at the top" for home in _MODELS if key in _keys(home)]
        if loc in _UNSUPPORTED_KEYS:
            hint = _UNSUPPORTED_KEYS[loc]
        elif close:
            hint = f"Did you mean `{close[0]}`?"
        elif homes:
            hint = f"Move it: it belongs {' or '.join(homes)}."
        else:
            hint = f"Remove it. Known here: {', '.join(known)}."
        self.add(loc, self.keys.get(loc, 0), "is not a known key", hint)

    def add_refusal(self, detail: ErrorDetails) -> None:
        """Turn pydantic's error into a problem at the nearest value that the file has."""
        loc = transform_settings.loc_in_file(detail["loc"])
        if any(loc[: len(unread)] == unread for unread in self.unread):
            return
        if detail["type"] == "extra_forbidden":
            self.add_unknown_key(loc)
            return
        if detail["type"] == "missing":
            parent = loc[:-1]
            self.add(loc, self.keys.get(parent, self.values.get(parent, 0)), "is missing", _example(loc))
            return
        context = detail.get("ctx", {})
        if loc == () and not context.get("at"):
            return  # The rule about the two folders: `add_overlap` reports it.
        for other in context.pop("more", ()):
            self.add_refusal({**detail, "loc": loc, "ctx": other})
        loc = (*loc, *context.get("at", ()))
        while loc not in self.values:
            loc = loc[:-1]
        if detail["type"] == "too_short" and self.value(loc):
            return  # Pydantic counts only valid globs; the file does have some.
        message = (
            transform_settings.problem_text(loc, detail)
            or context.get("message")
            or _PYDANTIC_TEXTS.get(detail["type"], detail["msg"])
        )
        if message == _PYDANTIC_TEXTS["literal_error"]:
            message += f": known are {context['expected'].replace(' or ', ' and ')}"
        if detail["type"] in _PYDANTIC_TEXTS and self.value(loc) is None:
            message = "has no value"
        self.add(loc, self.values[loc], message, context.get("hint") or _example(loc))

    def add_overlap(self, file: Path) -> None:
        """Check that the two folders are separate.

        The models check it only once everything else is valid.
        """
        anchored = anchored_paths({**self.data, "file": file})
        log, tables = (_folder_of(anchored.get(key)) for key in ("log", "tables"))
        if log and tables and (problem := folder_overlap(log, tables)):
            self.add(("tables", "path"), self.values[("tables", "path")], problem, OVERLAP_HINT)
