"""The settings of Iceberg tables and their catalog, and every mistake in them with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.model.schema import TableId
from tailrace.pipeline.config.settings import PipelineSettings
from tailrace.pipeline.config.settings_file import check_settings, load_settings
from tailrace.tables.iceberg.catalogs import Catalog

FILE = """\
name: shop
source:
  url: postgresql://localhost/shop
  tables: ["public.*"]
log: ./changes
tables:
  path: ./lake
  format: iceberg
"""


def write(folder: Path, *lines: str) -> Path:
    file = folder / "tailrace.yaml"
    file.write_text(FILE + "".join(f"  {line}\n" for line in lines))
    return file


def settings_of(folder: Path, *lines: str) -> PipelineSettings:
    return load_settings(write(folder, *lines), environment={"SECRET": "s3cret"})


def catalog(folder: Path, *lines: str) -> Catalog:
    found = settings_of(folder, *lines).tables.layout.location(TableId("public", "t"), "a-log").catalog
    assert found is not None
    return found


def test_by_default_the_folder_is_the_catalog(tmp_path: Path) -> None:
    assert catalog(tmp_path) == Catalog(kind="hadoop", root=tmp_path / "lake")
    assert catalog(tmp_path, "engine: spark", "catalog: {type: hadoop}").kind == "hadoop"


def test_a_server_may_ask_for_a_token(tmp_path: Path) -> None:
    found = catalog(tmp_path, "catalog: {type: rest, uri: https://h/c/, warehouse: lake, token: '${SECRET}'}")
    assert (found.uri, found.warehouse, found.properties) == ("https://h/c", "lake", {"token": "s3cret"})
    assert "s3cret" not in repr(found)


def test_a_credential_for_a_token_is_kept_secret(tmp_path: Path) -> None:
    lines = [
        "catalog:",
        "  type: rest",
        "  uri: https://h/c",
        "  properties:",
        "    credential: us:${SECRET}",
        "    header.X-Tenant: shop",
    ]
    found = catalog(tmp_path, *lines)
    assert found.properties == {"credential": "us:s3cret", "header.X-Tenant": "shop"}
    assert "s3cret" not in f"{found!r} {settings_of(tmp_path, *lines)!r}"


def test_a_database_may_ask_for_a_password_and_properties_are_passed_on(tmp_path: Path) -> None:
    found = catalog(
        tmp_path,
        "catalog:",
        "  type: jdbc",
        "  uri: jdbc:postgresql://h/db",
        "  user: u",
        "  password: ${SECRET}",
        "  properties: {io-impl: org.example.Io}",
    )
    assert found.properties == {"jdbc.user": "u", "jdbc.password": "s3cret", "io-impl": "org.example.Io"}
    assert "s3cret" not in repr(settings_of(tmp_path, "catalog: {type: rest, uri: https://h, token: '${SECRET}'}"))


@pytest.mark.parametrize(
    ("lines", "line", "where", "message"),
    [
        (["engine: delta-rs"], 9, "tables.engine", "Spark writes Iceberg tables"),
        (["catalog: {type: hive}"], 9, "tables.catalog.type", "unknown value"),
        (["catalog: {typ: rest}"], 9, "tables.catalog.typ", "not a known key"),
        (["catalog: {type: rest}"], 9, "tables.catalog", "has no `uri`"),
        (["catalog: {type: rest, uri: ftp://h}"], 9, "tables.catalog", "must begin with http://"),
        (["catalog: {type: jdbc, uri: jdbc:oracle:x}"], 9, "tables.catalog", "must begin with jdbc:postgresql://"),
        (["catalog: {type: hadoop, uri: x}"], 9, "tables.catalog.uri", "not for `type: hadoop`"),
        (["catalog: {type: jdbc, uri: 'jdbc:sqlite:/x', token: k}"], 9, "tables.catalog.token", "not for `type: jdbc`"),
        (["column_mapping: true"], 9, "tables.column_mapping", "not supported by `format: iceberg`"),
        (
            ["rules: {'public.t': {deletion_vectors: true}}"],
            9,
            "tables.rules.public.t.deletion_vectors",
            "not supported",
        ),
        (["mode: append", "soft_delete: true"], 10, "tables.soft_delete", "is for `mode: mirror`"),
        (["names: '{table}'"], 9, "tables.names", "no namespace"),
        (["rules: {'public.t': {name: t}}"], 9, "tables.rules.public.t.name", "no namespace"),
    ],
)
def test_a_mistake_is_reported_with_its_line(
    tmp_path: Path, lines: list[str], line: int, where: str, message: str
) -> None:
    (problem,) = check_settings(write(tmp_path, *lines), environment={})
    assert (problem.line, problem.where) == (line, where)
    assert message in problem.message
    assert problem.hint


def test_a_delta_table_has_no_catalog(tmp_path: Path) -> None:
    file = write(tmp_path, "catalog: {type: hadoop}")
    file.write_text(file.read_text().replace("iceberg", "delta"))
    (problem,) = check_settings(file, environment={})
    assert (problem.where, "needs no catalog" in problem.message) == ("tables.catalog", True)


def test_everything_that_iceberg_does_not_support_is_reported_at_once(tmp_path: Path) -> None:
    file = write(tmp_path, "engine: delta-rs", "catalog: {type: rest, user: u, password: p}")
    found = check_settings(file, environment={})
    assert [problem.where for problem in found] == ["tables.catalog", "tables.catalog.user", "tables.catalog.password"]
    file = write(tmp_path, "engine: delta-rs", "mode: history", "soft_delete: true", "column_mapping: true")
    found = check_settings(file, environment={})
    assert [problem.where for problem in found] == ["tables.engine", "tables.soft_delete", "tables.column_mapping"]


@pytest.mark.parametrize(("setting", "kept"), [("true", True), ("false", False), ("copy", "copy")])
def test_kept_loads_of_iceberg_tables_follow_the_settings(tmp_path: Path, setting: str, kept: bool | str) -> None:
    assert settings_of(tmp_path, f"keep_seed: {setting}").tables.keep_seed == kept
    assert settings_of(tmp_path).tables.keep_seed is True


def test_an_iceberg_table_may_be_partitioned(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "partition_by: [region, _is_deleted]", "soft_delete: true")
    assert settings.tables.spec_of(TableId("public", "t")).partition_by == ("region", "_is_deleted")


def test_an_iceberg_table_may_have_dead_letters(tmp_path: Path) -> None:
    rule = "{do: sha256, columns: [a], on_error: dead-letter}"
    file = write(tmp_path, "on_bad_row: dead-letter")
    file.write_text(f"{file.read_text()}transforms:\n  rules: [{rule}]\n")
    assert check_settings(file, environment={}) == []
    assert load_settings(file, environment={}).tables.dead_letters_enabled(TableId("public", "t"))
