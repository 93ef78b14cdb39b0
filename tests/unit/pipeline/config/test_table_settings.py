"""The table specs in the settings file, and every mistake in them with its line."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from tailrace.errors import TableUnusable
from tailrace.model.policies import EvolutionPolicies, EvolutionPolicy
from tailrace.model.schema import TableId
from tailrace.pipeline.config.setting_values import MetadataName
from tailrace.pipeline.config.settings import PipelineSettings
from tailrace.pipeline.config.settings_file import check_settings, load_settings
from tailrace.tables.delta.features import Features
from tailrace.tables.spec import METADATA, PLAIN_MIRROR, TableMode, TableSpec

FILE = """\
name: shop
source:
  url: postgresql://localhost/shop
  tables: ["public.*"]
log: ./changes
tables:
  path: ./lake
"""


def write(folder: Path, *lines: str) -> Path:
    file = folder / "tailrace.yaml"
    file.write_text(FILE + "".join(f"  {line}\n" for line in lines))
    return file


def settings_of(folder: Path, *lines: str) -> PipelineSettings:
    return load_settings(write(folder, *lines), environment={})


def spec(settings: PipelineSettings, table: str) -> TableSpec:
    return settings.tables.layout.location(TableId("public", table), "a-log").spec


def test_by_default_a_table_is_a_plain_mirror(tmp_path: Path) -> None:
    assert spec(settings_of(tmp_path), "orders") == PLAIN_MIRROR


def test_the_last_matching_rule_decides_and_other_keys_are_as_for_all(tmp_path: Path) -> None:
    settings = settings_of(
        tmp_path,
        "soft_delete: true",
        "metadata: [_seq, _op]",
        "rules:",
        '  "public.*_log": {mode: append}',
        '  "public.a_*": {mode: history, metadata: []}',
        '  "public.plain": {soft_delete: false, metadata: []}',
    )
    assert spec(settings, "orders") == TableSpec(soft_delete=True, metadata=("_op", "_seq"))
    assert spec(settings, "a_log") == TableSpec(mode=TableMode.HISTORY)
    assert spec(settings, "b_log") == TableSpec(mode=TableMode.APPEND, metadata=("_op", "_seq"))
    assert spec(settings, "plain") == PLAIN_MIRROR


def test_a_rule_sets_some_evolution_policies_and_the_others_are_as_for_all(tmp_path: Path) -> None:
    settings = settings_of(
        tmp_path,
        "evolution: {drop: apply, retype: stop}",
        "rules:",
        '  "public.a_*": {evolution: {retype: refresh, narrow: stop}}',
        '  "public.b_*": {mode: append}',
    )

    def policies(name: str) -> EvolutionPolicies:
        return settings.tables.policies_of(TableId("public", name))

    for_all = EvolutionPolicies(drop=EvolutionPolicy.APPLY, retype=EvolutionPolicy.STOP)
    assert policies("orders") == policies("b_log") == for_all == settings.tables.evolution.policies
    assert policies("a_log") == EvolutionPolicies(drop=EvolutionPolicy.APPLY, narrow=EvolutionPolicy.STOP)


def test_a_pattern_that_matches_no_table_is_found(tmp_path: Path) -> None:
    rules = "rules: {public.orders: {mode: append}, public.odrers: {mode: history}, 'public.o*': {}}"
    file = write(tmp_path, rules)
    file.write_text(f"{file.read_text()}load: {{modes: {{'other.*': never}}}}\n")
    settings = load_settings(file, environment={})
    assert settings.unmatched_patterns([TableId("public", "orders")]) == [
        "tables.rules.public.odrers",
        "load.modes.other.*",
    ]


def test_a_template_sets_the_paths_of_all_tables_and_a_rule_that_of_one(tmp_path: Path) -> None:
    rule = '  "public.orders": {name: gold/sales, columns: {a: b}}'
    settings = settings_of(tmp_path, "names: '{pipeline}/{schema}.{table}'", "rules:", rule)
    layout, root = settings.tables.layout, tmp_path / "lake"
    assert layout.path(TableId("public", "x/y")) == root / "shop" / "public.x%2Fy"
    assert layout.path(TableId("public", "orders")) == root / "gold" / "sales"
    assert spec(settings, "orders") == TableSpec(renamed_columns=(("a", "b"),))
    flat = settings_of(tmp_path, "names: '{table}'").tables.layout
    assert flat.path(TableId("public", "orders")) == root / "orders"
    (tmp_path / "la[k]e").mkdir()
    odd = settings_of(tmp_path / "la[k]e").tables.layout
    with pytest.raises(TableUnusable, match="delta-rs cannot use this path"):
        odd.path(TableId("public", "orders"))


def test_partitions_of_a_rule_use_the_column_names_of_the_lake(tmp_path: Path) -> None:
    settings = settings_of(
        tmp_path,
        "partition_by: [region, _op]",
        "rules:",
        '  "public.plain": {partition_by: []}',
        '  "public.named": {columns: {region: area}}',
        '  "public.own": {columns: {region: area}, partition_by: [area]}',
    )
    assert spec(settings, "orders") == TableSpec(partition_by=("region", "_op"))
    assert spec(settings, "plain") == PLAIN_MIRROR
    assert spec(settings, "named").partition_by == ("area", "_op")
    assert spec(settings, "own").partition_by == ("area",)


def test_settings_and_tables_have_the_same_metadata_names() -> None:
    assert get_args(MetadataName) == METADATA


@pytest.mark.parametrize(
    ("lines", "line", "where", "message"),
    [
        (["mode: scd2"], 8, "tables.mode", "known are 'mirror', 'history' and 'append'"),
        (["metadata: [_seq, _when]"], 8, "tables.metadata[1]", "known are '_op'"),
        (["mode: append", "soft_delete: true"], 9, "tables.soft_delete", "`mode: append` keeps deleted rows"),
        (["mode: append", "rules:", '  "a.b": {soft_delete: true}'], 10, "tables.rules.a.b.soft_delete", "is for"),
        (["rules:", '  "a.b": {mod: append}'], 9, "tables.rules.a.b.mod", "not a known key"),
        (["rules:", '  "a.b": {evolution: {drop: maybe}}'], 9, "tables.rules.a.b.evolution.drop", "unknown value"),
        (["rules:", '  "a.b": {evolution: {drp: stop}}'], 9, "tables.rules.a.b.evolution.drp", "not a known key"),
        (["rules:", '  "orders": {mode: append}'], 9, "tables.rules.orders", "names no schema"),
        (["names: all"], 8, "tables.names", "lacks {table}"),
        (["names: ../{table}"], 8, "tables.names", "one to three folder names"),
        (["names: '{schema}/{name}/{table}'"], 8, "tables.names", "one to three folder names"),
        (["names: a/b/c/{table}"], 8, "tables.names", "one to three folder names"),
        (["rules:", '  "a.b": {name: a/_delta_log}'], 9, "tables.rules.a.b.name", "Delta's own"),
        (["rules:", '  "a.b": {columns: {x: z, y: Z}}'], 9, "tables.rules.a.b.columns.y", "also the new name of `x`"),
        (["partition_by: region"], 8, "tables.partition_by", "must be a list"),
        (["partition_by: [region, Region]"], 8, "tables.partition_by", "names a column twice"),
        (["rules:", '  "a.b": {partition_by: [a, ""]}'], 9, "tables.rules.a.b.partition_by[1]", "must not be empty"),
        (["rules:", '  "a.b": {columns: {x: "y\\0z"}}'], 9, "tables.rules.a.b.columns.x", "must not hold a zero byte"),
        (["rules:", '  "a.b": append'], 9, "tables.rules.a.b", "must be a mapping"),
    ],
)  # fmt: skip
def test_a_mistake_is_reported_with_its_line_and_remedy(
    tmp_path: Path, lines: list[str], line: int, where: str, message: str
) -> None:
    (problem,) = check_settings(write(tmp_path, *lines), environment={})
    assert (problem.line, problem.where) == (line, where)
    assert message in problem.message
    assert problem.hint


@pytest.mark.parametrize(
    ("rules", "example"),
    [
        ("[append]", 'rules: {"public.orders": '), ('{"a.b": append}', 'rules: {"public.orders": '),
        ('{"a.b": {mode: 3}}', "mode: mirror"), ('{"a.b": {name: [x]}}', "name: gold/sales"),
        ('{"a.b": {columns: [x]}}', "columns: {cust: "),
    ],
)  # fmt: skip
def test_the_example_shows_the_key_with_the_mistake(tmp_path: Path, rules: str, example: str) -> None:
    (problem,) = check_settings(write(tmp_path, f"rules: {rules}"), environment={})
    assert f"For example: `{example}" in problem.hint


def test_all_incompatible_keys_are_reported_at_once(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "mode: history",
        "soft_delete: true",
        "deletion_vectors: true",
        "rules:",
        '  "a.b": {column_mapping: true, soft_delete: true}',
        '  "c.d": {columns: {}}',
    )
    assert [problem.where for problem in check_settings(file, environment={})] == [
        "tables.soft_delete",
        "tables.deletion_vectors",
        "tables.rules.a.b.column_mapping",
        "tables.rules.a.b.soft_delete",
    ]
    names = write(tmp_path, "rules:", '  "a.b": {columns: {x: z, y: Z, w: z}}')
    assert [problem.where for problem in check_settings(names, environment={})] == [
        "tables.rules.a.b.columns.y",
        "tables.rules.a.b.columns.w",
    ]


def test_the_example_for_a_rule_is_the_one_for_all_tables(tmp_path: Path) -> None:
    (problem,) = check_settings(write(tmp_path, 'rules: {"a.b": {on_bad_row: skip}}'), environment={})
    assert "`on_bad_row: dead-letter`" in problem.hint


@pytest.mark.parametrize("engine", ["delta-rs", "spark"])
@pytest.mark.parametrize(
    "line",
    ["mode: history", "soft_delete: true", "metadata: [_seq]", "on_bad_row: dead-letter",
     'rules: {"a.b": {mode: append}}', 'rules: {"a.b": {columns: {c: d}}}'],
)  # fmt: skip
def test_either_engine_writes_tables_of_any_spec(tmp_path: Path, engine: str, line: str) -> None:
    assert not check_settings(write(tmp_path, f"engine: {engine}", line), environment={})


@pytest.mark.parametrize("engine", ["delta-rs", "spark"])
def test_either_engine_writes_partitions(tmp_path: Path, engine: str) -> None:
    lines = (f"engine: {engine}", "partition_by: [a]", 'rules: {"a.b": {partition_by: [c]}}')
    assert not check_settings(write(tmp_path, *lines), environment={})


@pytest.mark.parametrize(
    ("line", "where"),
    [
        ("deletion_vectors: true", "tables.deletion_vectors"), ("column_mapping: true", "tables.column_mapping"),
        ('rules: {"a.b": {column_mapping: true}}', "tables.rules.a.b.column_mapping"),
    ],
)  # fmt: skip
def test_features_that_delta_rs_does_not_write_are_refused_with_it(tmp_path: Path, line: str, where: str) -> None:
    (problem,) = check_settings(write(tmp_path, "engine: delta-rs", line), environment={})
    assert (problem.where, problem.line) == (where, 9)
    assert "engine: spark" in problem.hint
    assert not check_settings(write(tmp_path, "engine: spark", line), environment={})


def test_a_rule_decides_what_features_its_tables_get(tmp_path: Path) -> None:
    rule = 'rules: {"a.b": {deletion_vectors: false, column_mapping: true}}'
    file = write(tmp_path, "engine: spark", "deletion_vectors: true", rule)
    layout = load_settings(file, environment={}).tables.layout
    locations = [layout.location(TableId("a", name), "x") for name in ("b", "c")]
    assert [location.features for location in locations] == [
        Features(column_mapping=True),
        Features(deletion_vectors=True),
    ]
