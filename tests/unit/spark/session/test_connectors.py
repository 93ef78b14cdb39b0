"""The connector that a session gets, and the error where there is none."""

from __future__ import annotations

import re
from pathlib import Path

import pyspark
import pytest

from tailrace.errors import Unsupported
from tailrace.spark.session.connectors import (
    CONNECTORS,
    ICEBERG_CONNECTORS,
    catalog_settings,
    connector_settings,
    iceberg_settings,
)
from tailrace.tables.iceberg.catalogs import Catalog

PACKAGES, EXTENSIONS = "spark.jars.packages", "spark.sql.extensions"


def test_a_spark_without_a_connector_is_refused_with_those_that_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyspark, "__version__", "4.3.0")
    with pytest.raises(Unsupported) as refused:
        connector_settings({})
    assert refused.value.fields == {"pyspark": "4.3.0"}
    assert "pyspark==4.2.*" in refused.value.hint
    assert "engine: delta-rs" in refused.value.hint


@pytest.mark.parametrize("line", ["4.1", "4.2"])
def test_the_connector_of_the_spark_line_is_added_to_the_users_settings(
    line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pyspark, "__version__", f"{line}.1")
    configured = {PACKAGES: "org.example:other:1", EXTENSIONS: "org.example.Extension", "spark.driver.memory": "2g"}
    settings = connector_settings(configured)
    assert settings[PACKAGES] == f"org.example:other:1,{CONNECTORS[line]}"
    assert f"delta-spark_{line}_" in CONNECTORS[line]
    assert settings[EXTENSIONS] == "org.example.Extension,io.delta.sql.DeltaSparkSessionExtension"
    assert settings["spark.sql.catalog.spark_catalog"].endswith("DeltaCatalog")
    assert settings["spark.driver.memory"] == "2g"


@pytest.mark.parametrize(
    "configured", [{PACKAGES: "io.delta:delta-spark_9.9_2.13:1"}, {"spark.jars": "/x/delta-spark.jar"}]
)
def test_a_connector_named_in_the_settings_is_kept(configured: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyspark, "__version__", "9.9.0")
    settings = connector_settings(configured)
    assert settings.get(PACKAGES) == configured.get(PACKAGES)


FOLDER = Catalog(kind="hadoop", root=Path("/lake"))
DATABASE = Catalog(
    kind="jdbc", root=Path("/lake"), uri="jdbc:postgresql://h/d", properties={"jdbc.user": "u", "jdbc.password": "p"}
)


def test_a_spark_without_an_iceberg_connector_is_refused_with_those_that_have_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pyspark, "__version__", "4.3.0")
    with pytest.raises(Unsupported, match="tested Iceberg connector") as refused:
        iceberg_settings({}, FOLDER)
    assert "pyspark==4.1.*" in refused.value.hint


def test_the_iceberg_connector_is_added_with_the_driver_of_its_catalog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyspark, "__version__", "4.1.4")
    assert iceberg_settings({}, FOLDER)[PACKAGES] == ICEBERG_CONNECTORS["4.1"]
    connector, driver = iceberg_settings({}, DATABASE)[PACKAGES].split(",")
    assert (connector, driver.startswith("org.postgresql:")) == (ICEBERG_CONNECTORS["4.1"], True)
    configured = {"spark.jars": "/x/iceberg-spark-runtime.jar,/x/postgresql.jar"}
    assert PACKAGES not in iceberg_settings(configured, DATABASE)
    assert iceberg_settings(configured, DATABASE)[EXTENSIONS].endswith("IcebergSparkSessionExtensions")


def test_secrets_of_a_catalog_are_not_shown_by_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyspark, "__version__", "4.1.4")
    name = "spark.sql.redaction.options.regex"
    hidden = re.compile(iceberg_settings({}, FOLDER)[name])
    assert all(hidden.search(f"spark.sql.catalog.tailrace.{key}") for key in ("credential", "uri", "header.X-Key"))
    assert iceberg_settings({name: "(?i)all"}, FOLDER)[name] == "(?i)all"


def test_a_session_knows_its_catalog() -> None:
    name = "spark.sql.catalog.tailrace"
    folder, database = catalog_settings(FOLDER), catalog_settings(DATABASE)
    assert (folder[f"{name}.type"], folder[f"{name}.warehouse"]) == ("hadoop", "/lake")
    assert (database[f"{name}.uri"], database[f"{name}.jdbc.password"]) == ("jdbc:postgresql://h/d", "p")
    server = catalog_settings(Catalog(kind="rest", root=Path("/lake"), uri="http://h", warehouse="w"))
    assert (server[f"{name}.warehouse"], server[f"{name}.cache-enabled"]) == ("w", "false")
