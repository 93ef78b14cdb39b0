"""Define the settings of a pipeline, as models that refuse unusable values.

A `PipelineSettings` that exists is usable as far as the file alone shows: nothing here opens a connection. The URL
never appears in a `repr` or an error, and neither does any other value that could be a secret. `setting_values.py`
checks single values, `source_settings.py` has the source's models, and `settings_file.py` makes settings of a file.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, PrivateAttr, model_validator
from pydantic_core import PydanticCustomError

from tailrace.model.policies import EvolutionPolicies, EvolutionPolicy
from tailrace.pipeline.config import transform_settings
from tailrace.pipeline.config.catalog_settings import CatalogSettings
from tailrace.pipeline.config.document import Loc
from tailrace.pipeline.config.setting_values import (
    Age,
    BadRow,
    Columns,
    Connections,
    Count,
    Duration,
    Endpoint,
    FileSize,
    Folder,
    Glob,
    Limit,
    LoadModeName,
    LogFolder,
    LongAgo,
    MetadataName,
    Name,
    Share,
    Size,
    TableModeName,
    Template,
    Templates,
    Url,
    check_format,
    check_spark_setting,
    refusal,
    refuse,
)
from tailrace.pipeline.config.source_settings import FROZEN, SourceSettings, glob_matches, matches
from tailrace.storage.objects import ObjectPath
from tailrace.transforms.rules import Transforms

if TYPE_CHECKING:
    # Importing them costs an import of pyarrow, which `tailrace check` has no use for.
    from tailrace.changelog.maintain.maintenance import MaintenancePolicy
    from tailrace.model.schema import TableId
    from tailrace.tables.delta.features import Features
    from tailrace.tables.location import LakeLayout
    from tailrace.tables.spec import TableSpec

SEALS_PER_MAX_BYTES = 8
"""Seals that fit into the log's limit.

Only sealed commits can be trimmed, so a log with a limit seals before much of it is unsealed.
"""


class RetentionSettings(BaseModel):
    """Limits for the age and size of rows that no reader needs any more."""

    model_config = FROZEN
    age: Age = 7 * 86_400.0
    bytes: Limit = None


class SealSettings(BaseModel):
    """Limits that make capture seal commits; the first one exceeded counts."""

    model_config = FROZEN
    bytes: Size = 128 << 20
    commits: Count = 4_096
    age: Duration = 600.0


class LogSettings(BaseModel):
    """The change log: its folder or object store path, and its maintenance."""

    model_config = FROZEN
    path: LogFolder
    endpoint: Endpoint | None = None
    region: str | None = None
    max_bytes: Limit = None
    retention: RetentionSettings = RetentionSettings()
    seal: SealSettings = SealSettings()
    grace: Duration = 300.0

    @model_validator(mode="after")
    def _add_store_to_path(self) -> LogSettings:
        store = {"endpoint": self.endpoint, "region": self.region}
        if isinstance(self.path, ObjectPath):
            # Every process that has the path then needs nothing else.
            object.__setattr__(self, "path", ObjectPath.parse(str(self.path), **store))
        elif any(store.values()):
            raise refusal("is a folder, and has an endpoint or a region", "Remove them, or give `path: s3://…`.")
        return self

    @property
    def maintenance_policy(self) -> MaintenancePolicy:
        """The same settings in the form that log maintenance takes."""
        from tailrace.changelog.maintain.maintenance import MaintenancePolicy
        from tailrace.changelog.maintain.retention import RetentionPolicy

        seal_bytes = self.seal.bytes
        if self.max_bytes is not None:
            seal_bytes = min(seal_bytes, self.max_bytes // SEALS_PER_MAX_BYTES)
        policy = RetentionPolicy(age_seconds=self.retention.age, bytes=self.retention.bytes, max_bytes=self.max_bytes)
        return MaintenancePolicy(
            seal_bytes=seal_bytes,
            seal_commits=self.seal.commits,
            seal_seconds=self.seal.age,
            grace_seconds=self.grace,
            retention=policy,
        )


class EvolutionSettings(BaseModel):
    """The policy for each kind of schema change; see docs/guides/evolution.md."""

    model_config = FROZEN
    add: Literal["apply", "stop", "refresh"] = "apply"
    drop: Literal["keep-null", "apply", "stop", "refresh"] = "keep-null"
    rename: Literal["apply", "stop", "refresh"] = "apply"
    widen: Literal["apply", "stop", "refresh"] = "apply"
    narrow: Literal["refresh", "stop"] | None = None
    retype: Literal["refresh", "stop"] = "refresh"
    rewrite: Literal["refresh", "stop"] = "refresh"
    key: Literal["refresh", "stop"] = "refresh"
    recreate: Literal["refresh", "stop"] = "refresh"
    partition: Literal["refresh", "stop"] = "refresh"

    @property
    def policies(self) -> EvolutionPolicies:
        return EvolutionPolicies(
            **{kind: EvolutionPolicy(policy) for kind, policy in self.model_dump(exclude_none=True).items()}
        )


class UpkeepSettings(BaseModel):
    """Upkeep of lake tables: compaction and removal of old files; see docs/guides/upkeep.md."""

    model_config = FROZEN
    join: bool = True
    file: FileSize = 128 << 20
    budget: Share = 0.1
    remove_after: LongAgo = None


class TableRuleSettings(BaseModel):
    """Settings for some tables; a key that is not set is as `tables` says."""

    model_config = FROZEN
    mode: TableModeName | None = None
    soft_delete: bool | None = None
    metadata: tuple[MetadataName, ...] | None = None
    partition_by: Columns | None = None
    on_bad_row: BadRow | None = None
    name: Template | None = None
    deletion_vectors: bool | None = None
    column_mapping: bool | None = None
    evolution: EvolutionSettings = EvolutionSettings()
    columns: dict[str, Annotated[str, Field(min_length=1)]] = {}

    @model_validator(mode="after")
    def _names_are_distinct(self) -> TableRuleSettings:
        refuse(self._duplicate_names())
        return self

    def _duplicate_names(self) -> Iterator[PydanticCustomError]:
        seen: dict[str, str] = {}
        for old, new in self.columns.items():
            if "\0" in new:
                yield refusal("must not hold a zero byte", "No table can have such a column.", ("columns", old))
            if (other := seen.setdefault(new.lower(), old)) != old:
                yield refusal(f"is also the new name of `{other}`", "Give each column its own name.", ("columns", old))


class TablesSettings(BaseModel):
    """The lake tables: each in its folder, `<path>/<schema>/<table>` by default."""

    model_config = FROZEN
    _pipeline: str = PrivateAttr(default="")
    _transforms: Transforms = PrivateAttr(default=Transforms())
    format: Annotated[Literal["delta", "iceberg"], BeforeValidator(check_format)] = "delta"
    catalog: CatalogSettings | None = None
    engine: Literal["delta-rs", "spark"] = "delta-rs"
    path: Folder
    mode: TableModeName = "mirror"
    soft_delete: bool = False
    metadata: tuple[MetadataName, ...] = ()
    partition_by: Columns = ()
    names: Templates = "{schema}/{table}"
    rules: dict[Glob, TableRuleSettings] = {}
    evolution: EvolutionSettings = EvolutionSettings()
    upkeep: UpkeepSettings = UpkeepSettings()
    on_bad_row: BadRow = "stop"
    keep_seed: bool | Literal["copy"] = True
    deletion_vectors: bool = False
    column_mapping: bool = False

    @model_validator(mode="after")
    def _keys_are_compatible(self) -> TablesSettings:
        if self.format == "iceberg":
            of_format = [*self._keys_of_delta_only(), *self._unsupported_by_iceberg()]
        else:
            of_format = [*self._catalog_without_iceberg(), *self._features_without_spark()]
        refuse([*of_format, *self._soft_delete_without_mirror()])
        return self

    def _catalog_without_iceberg(self) -> Iterator[PydanticCustomError]:
        if self.catalog is not None:
            hint = "Remove it, or write `format: iceberg`."
            yield refusal("is for `format: iceberg` only: a Delta table needs no catalog", hint, ("catalog",))

    def _keys_of_delta_only(self) -> Iterator[PydanticCustomError]:
        if "engine" in self.model_fields_set and self.engine != "spark":
            yield refusal("is for `format: delta` only: Spark writes Iceberg tables", "Remove it.", ("engine",))

    def _unsupported_by_iceberg(self) -> Iterator[PydanticCustomError]:
        for at, settings in self._all_and_rules():
            for name in ("deletion_vectors", "column_mapping"):
                if getattr(settings, name):
                    yield refusal("is not supported by `format: iceberg`", "Remove it.", (*at, name))
            name, template = (
                ("name", settings.name) if isinstance(settings, TableRuleSettings) else ("names", settings.names)
            )
            if template is not None and "/" not in template:
                hint = "For example: `{schema}/{table}`."
                yield refusal("has no namespace, which an Iceberg table needs", hint, (*at, name))

    def _soft_delete_without_mirror(self) -> Iterator[PydanticCustomError]:
        for at, settings in self._all_and_rules():
            mode = settings.mode or self.mode
            if settings.soft_delete and mode != "mirror":
                yield refusal(
                    f"is for `mode: mirror` only: a table in `mode: {mode}` keeps deleted rows anyway",
                    "Remove it, or write `mode: mirror`.",
                    (*at, "soft_delete"),
                )

    def _features_without_spark(self) -> Iterator[PydanticCustomError]:
        for at, settings in self._all_and_rules() if self.engine != "spark" else ():
            for name in ("deletion_vectors", "column_mapping"):
                if getattr(settings, name):
                    yield refusal(
                        "is for `engine: spark` only: delta-rs does not write such tables",
                        "Remove it, or write `engine: spark`.",
                        (*at, name),
                    )

    def _all_and_rules(self) -> Iterator[tuple[Loc, TablesSettings | TableRuleSettings]]:
        """Yield the settings for all tables and for some, with their paths."""
        yield (), self
        for glob, rule in self.rules.items():
            yield ("rules", glob), rule

    def _features_of(self, table: TableId) -> Features:
        from tailrace.tables.delta.features import Features

        rule = self._rule_of(table)
        return Features(
            deletion_vectors=self.deletion_vectors if rule.deletion_vectors is None else rule.deletion_vectors,
            column_mapping=self.column_mapping if rule.column_mapping is None else rule.column_mapping,
        )

    def spec_of(self, table: TableId) -> TableSpec:
        """Return the table spec: by the last rule that matches, else as for all tables."""
        from tailrace.tables.spec import DELETED, ICEBERG_DELETED, TableMode, TableSpec

        rule = self._rule_of(table)
        mode = rule.mode or self.mode
        soft_delete_wanted = self.soft_delete if rule.soft_delete is None else rule.soft_delete
        soft_delete = soft_delete_wanted and mode == "mirror"
        if holds_messages := transform_settings.is_message_table(self._transforms, table):
            transform_settings.refuse_modes(table, rule.mode, rule.soft_delete)
            mode, soft_delete = "mirror", False
        metadata = self.metadata if rule.metadata is None else rule.metadata
        partition_by = self.partition_by if rule.partition_by is None else rule.partition_by
        return TableSpec(
            mode=TableMode(mode),
            soft_delete=soft_delete,
            metadata=tuple(sorted(set(metadata))),
            deleted_column=ICEBERG_DELETED if soft_delete and self.format == "iceberg" else DELETED,
            renamed_columns=tuple(sorted(rule.columns.items())),
            partition_by=tuple(rule.columns.get(name, name) for name in partition_by),
            holds_messages=holds_messages,
        )

    def policies_of(self, table: TableId) -> EvolutionPolicies:
        """Return the evolution policies.

        The last rule that matches decides; kinds that it does not name are as for all tables.
        """
        evolution = self._rule_of(table).evolution
        return self.evolution.model_copy(update=evolution.model_dump(include=evolution.model_fields_set)).policies

    def _name_of(self, table: TableId) -> str:
        return self._rule_of(table).name or self.names

    def _rule_of(self, table: TableId) -> TableRuleSettings:
        matching = [rule for glob, rule in self.rules.items() if glob_matches(glob, table)]
        return matching[-1] if matching else TableRuleSettings()

    @property
    def layout(self) -> LakeLayout:
        """The location and spec of every lake table."""
        from tailrace.tables.location import LakeLayout

        return LakeLayout(
            root=self.path,
            spec_of=self.spec_of,
            path_template_of=self._name_of,
            pipeline=self._pipeline,
            engine=self.engine,
            features_of=self._features_of,
            file_bytes=self.upkeep.file,
            catalog=(self.catalog or CatalogSettings()).catalog(self.path) if self.format == "iceberg" else None,
        )

    @property
    def written_by_spark(self) -> bool:
        """True if one of Spark's connectors writes the tables."""
        return self.format == "iceberg" or self.engine == "spark"

    def dead_letters_enabled(self, table: TableId) -> bool:
        """Return whether rejected changes of the table become dead letters.

        The last rule that matches decides.
        """
        return (self._rule_of(table).on_bad_row or self.on_bad_row) == "dead-letter"


class LoadSettings(BaseModel):
    """Loads: when, in which way, and how much of the source they may use."""

    model_config = FROZEN
    mode: LoadModeName = "initial"
    modes: dict[Glob, LoadModeName] = {}
    way: Literal["auto", "exact", "chunked"] = "auto"
    connections: Connections = 2
    chunk: Size = 64 << 20
    time_limit: Duration = 3_600.0
    chunk_timeout: Duration = 900.0
    throttle: bool = True
    secret_standby: Url | None = Field(default=None, alias="standby")

    @model_validator(mode="after")
    def _standby_is_usable(self) -> LoadSettings:
        if self.standby and self.way == "exact":
            raise refusal(
                "has both `standby` and `way: exact`: only the source itself can export a snapshot",
                "Remove `way` or `standby`, or write `way: chunked`.",
            )
        return self

    @property
    def standby(self) -> str | None:
        """URL, with password, of the standby to read from; None: read from the source itself."""
        return self.secret_standby.get_secret_value() if self.secret_standby else None

    def mode_of(self, table: TableId) -> LoadModeName:
        """Return the load mode: by the last pattern that matches, else `mode`."""
        matching = [mode for glob, mode in self.modes.items() if glob_matches(glob, table)]
        return matching[-1] if matching else self.mode


class SparkSettings(BaseModel):
    """The Spark that does the work; by default our own, on this machine."""

    model_config = FROZEN
    master: str | None = None
    settings: dict[str, Annotated[str, BeforeValidator(check_spark_setting)]] = {}


class PipelineSettings(BaseModel):
    """One pipeline. `file` is the settings file; relative paths start at its folder."""

    model_config = FROZEN
    name: Name
    source: SourceSettings
    log: LogSettings
    tables: TablesSettings
    load: LoadSettings = LoadSettings()
    spark: SparkSettings = SparkSettings()
    transforms: Annotated[Transforms, BeforeValidator(transform_settings.with_plain_numbers)] = Transforms()
    file: Path

    @model_validator(mode="before")
    @classmethod
    def _anchor_paths(cls, values: Any) -> Any:
        return anchored_paths(values) if isinstance(values, dict) and "file" in values else values

    @model_validator(mode="after")
    def _pass_name_to_tables(self) -> PipelineSettings:
        self.tables._pipeline, self.tables._transforms = self.name, self.transforms
        return self

    def unmatched_patterns(self, tables: Collection[TableId]) -> list[str]:
        """Return patterns for some tables that match none of these; probably misspelled."""
        patterns = [("tables.rules", glob) for glob in self.tables.rules]
        patterns += [("load.modes", glob) for glob in self.load.modes]
        return [f"{where}.{glob}" for where, glob in patterns if not any(glob_matches(glob, table) for table in tables)]

    def has(self, table: TableId) -> bool:
        """Return whether a lake table belongs to this pipeline under its current rules."""
        return transform_settings.may_have_rows(self.transforms, table, wanted=matches(self.source, table))

    @model_validator(mode="after")
    def _rules_are_supported(self) -> PipelineSettings:
        for problem, hint in transform_settings.unsupported_rules(self.transforms):
            raise refusal(problem, hint, ("transforms", "rules"))
        tables = [self.tables.on_bad_row, *(rule.on_bad_row for rule in self.tables.rules.values())]
        if (rule := transform_settings.rule_with_dead_letters(self.transforms)) and "dead-letter" not in tables:
            problem = f"has the rule `{rule}`, which makes dead letters, but no table has `on_bad_row: dead-letter`"
            hint = "Write `on_bad_row: dead-letter` under `tables`."
            raise refusal(problem, hint, ("transforms", "rules"))
        return self

    @model_validator(mode="after")
    def _folders_are_separate(self) -> PipelineSettings:
        if problem := folder_overlap(self.log.path, self.tables.path):
            raise refusal(problem, OVERLAP_HINT)
        return self


def anchored_paths(values: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with absolute paths, and `log: folder` as `log: {path: folder}`."""
    # Not `resolve`: a mounted settings file is often a link into a folder that is replaced at every change.
    file = Path(os.path.abspath(values["file"]))

    def anchor(holder: Any) -> Any:
        path = holder.get("path") if isinstance(holder, dict) else None
        if not isinstance(path, (str, Path)) or not str(path).strip() or "://" in str(path):
            return holder
        return {**holder, "path": os.path.join(file.parent, os.path.expanduser(path))}

    log = values.get("log")
    anchored = {
        **values,
        "file": file,
        "log": anchor({"path": log} if isinstance(log, (str, Path)) else log),
        "tables": anchor(values.get("tables")),
        "transforms": transform_settings.with_key_paths(values.get("transforms"), file.parent),
    }
    return {key: value for key, value in anchored.items() if key in values}


OVERLAP_HINT = "Give the log and the tables separate folders, e.g. `./shop/changes` and `./shop/lake`."


def folder_overlap(log: Path | ObjectPath, tables: Path) -> str | None:
    if isinstance(log, ObjectPath):
        return None
    if log == tables:
        return "is the log's folder"
    if log in tables.parents:
        return "is inside the log's folder"
    return "contains the log's folder" if tables in log.parents else None
