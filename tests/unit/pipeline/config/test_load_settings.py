"""The `load:` and `spark:` sections, and every mistake in them with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.model.schema import TableId
from tailrace.pipeline.config.document import Problem
from tailrace.pipeline.config.settings import PipelineSettings
from tailrace.pipeline.config.settings_file import check_settings, load_settings

FILE = """\
name: shop
source:
  url: postgresql://localhost/shop
  tables: ["public.*"]
log: ./changes
tables: {{path: ./lake}}
{section}:
{lines}
"""

MODES = "initial, always, initial_only, when_needed, schema_only, never"


def write(folder: Path, section: str, *lines: str) -> Path:
    file = folder / "tailrace.yaml"
    file.write_text(FILE.format(section=section, lines="\n".join(f"  {line}" for line in lines)))
    return file


def settings_of(folder: Path, section: str, *lines: str, **environment: str) -> PipelineSettings:
    return load_settings(write(folder, section, *lines), environment=environment)


def problem_of(folder: Path, section: str, *lines: str) -> Problem:
    (problem,) = check_settings(write(folder, section, *lines), environment={})
    return problem


def test_by_default_tables_are_loaded_once_over_two_connections(tmp_path: Path) -> None:
    load = settings_of(tmp_path, "load", "throttle: true").load
    assert (load.mode, load.way, load.connections, load.chunk) == ("initial", "auto", 2, 64 << 20)
    assert (load.time_limit, load.chunk_timeout, load.throttle, load.standby) == (3600.0, 900.0, True, None)


def test_everything_about_loads_can_be_set(tmp_path: Path) -> None:
    load = settings_of(
        tmp_path,
        "load",
        "mode: when_needed",
        "way: chunked",
        "connections: 4",
        "chunk: 16MiB",
        "time_limit: 20min",
        "chunk_timeout: 90s",
        "throttle: false",
        "standby: postgresql://app@standby/shop",
    ).load
    assert (load.mode, load.way, load.connections, load.chunk) == ("when_needed", "chunked", 4, 16 << 20)
    assert (load.time_limit, load.chunk_timeout, load.throttle) == (1200.0, 90.0, False)
    assert load.standby == "postgresql://app@standby/shop"


def test_the_last_pattern_that_matches_a_table_decides_its_mode(tmp_path: Path) -> None:
    lines = ["mode: when_needed", "modes:", '  "public.*": initial', '  "public.audit_*": never', '  "*.x": always']
    load = settings_of(tmp_path, "load", *lines).load
    found = {name: load.mode_of(TableId("public", name)) for name in ("orders", "audit_1", "x")}
    assert found == {"orders": "initial", "audit_1": "never", "x": "always"}
    assert load.mode_of(TableId("sales", "orders")) == "when_needed"


def test_the_password_of_a_standby_is_encoded_and_shown_nowhere(tmp_path: Path) -> None:
    settings = settings_of(
        tmp_path, "load", "standby: postgresql://app:${PGPASSWORD}@standby/shop", PGPASSWORD="p@ss/w0rd"
    )
    assert settings.load.standby == "postgresql://app:p%40ss%2Fw0rd@standby/shop"
    assert "w0rd" not in repr(settings)


def test_a_spark_setting_may_be_text_number_or_boolean(tmp_path: Path) -> None:
    lines = ['master: "local[4]"', "settings:"]
    lines += ["  spark.driver.memory: 2g", "  spark.sql.shuffle.partitions: 8", "  spark.ui.enabled: true"]
    spark = settings_of(tmp_path, "spark", *lines).spark
    assert spark.master == "local[4]"
    assert spark.settings == {
        "spark.driver.memory": "2g",
        "spark.sql.shuffle.partitions": "8",
        "spark.ui.enabled": "true",
    }


@pytest.mark.parametrize(
    ("section", "lines", "line", "where", "message", "hint"),
    [
        ("load", ["mode: sometimes"], 8, "load.mode", "has an unknown value", MODES),
        ("load", ["mode:"], 8, "load.mode", "has no value", MODES),
        ("load", ["modes: {public.a: sometimes}"], 8, "load.modes.public.a", "has an unknown value", MODES),
        ("load", ["modes:", "  a: never"], 9, "load.modes.a", "names no schema", '"public.a"'),
        ("load", ["modes:", '  "public.[a": never'], 9, "load.modes.public.[a", "does not close it", "[[]"),
        ("load", ["modes: [public.a]"], 8, "load.modes", "must be a mapping", "never"),
        ("load", ["way: fast"], 8, "load.way", "has an unknown value", "`way: chunked`"),
        ("load", ["connections: 0"], 8, "load.connections", "from 1 to 99", "`connections: 4`"),
        ("load", ["connections: 100"], 8, "load.connections", "from 1 to 99", "`connections: 4`"),
        ("load", ["connections: many"], 8, "load.connections", "from 1 to 99", "`connections: 4`"),
        ("load", ["connections:"], 8, "load.connections", "has no value", "`connections: 4`"),
        ("load", ["chunk: 64"], 8, "load.chunk", "is less than 1 MiB", "Was a unit forgotten?"),
        ("load", ["chunk: 64M"], 8, "load.chunk", "is not a size", "MiB"),
        ("load", ["way: auto", "time_limit: 1 hour"], 9, "load.time_limit", "is not a length of time", "h and d"),
        ("load", ["time_limit: none"], 8, "load.time_limit", "is not a length of time", "h and d"),
        ("load", ["chunk_timeout: [5]"], 8, "load.chunk_timeout", "must be a number", "min"),
        ("load", ["throttle: gently"], 8, "load.throttle", "must be true or false", "`throttle: false`"),
        ("load", ["standby: standby.example.com"], 8, "load.standby", "must be a URL", "postgresql://"),
        ("load", ["standby: mysql://h/d"], 8, "load.standby", "not available yet", "postgresql://"),
        ("load", ["standby: ${NOWHERE}"], 8, "load.standby", "NOWHERE, which is not set", "Set it"),
        ("load", ["standby: postgresql://s/d", "way: exact"], 8, "load", "both `standby` and `way: exact`", "chunked"),
        ("load", ["connection: 2"], 8, "load.connection", "is not a known key", "Did you mean `connections`?"),
        ("load", ["master: x"], 8, "load.master", "is not a known key", "Move it: it belongs under `spark`."),
        ("load", ["zzz: 1"], 8, "load.zzz", "is not a known key", "Known here: mode, modes, way, connections"),
        ("spark", ["master: 4"], 8, "spark.master", "must be text", "local[4]"),
        ("spark", ["settings: 2g"], 8, "spark.settings", "must be a mapping", "spark.driver.memory"),
        ("spark", ["settings:", "  spark.x: [1]"], 9, "spark.settings.spark.x", "must be text", "spark.driver.memory"),
        ("spark", ["memory: 2g"], 8, "spark.memory", "is not a known key", "Known here: master, settings"),
    ],
)  # fmt: skip
def test_a_mistake_is_reported_with_its_line_and_remedy(
    tmp_path: Path, section: str, lines: list[str], line: int, where: str, message: str, hint: str
) -> None:
    problem = problem_of(tmp_path, section, *lines)
    assert (problem.line, problem.where) == (line, where)
    assert message in problem.message
    assert hint in problem.hint


@pytest.mark.parametrize(("text", "message"), [("load: fast", "must be a mapping"), ("load:", "has no value")])
def test_a_section_that_is_not_a_mapping_is_reported(tmp_path: Path, text: str, message: str) -> None:
    file = write(tmp_path, "load", "throttle: true")
    file.write_text(file.read_text().replace("load:\n  throttle: true", text))
    (problem,) = check_settings(file, environment={})
    assert (problem.line, problem.where, problem.message) == (7, "load", message)
    assert "connections: 4" in problem.hint
