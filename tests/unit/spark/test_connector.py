"""Which connector a session gets, and what is said where there is none."""

from __future__ import annotations

import pyspark
import pytest

from tailrace.errors import Unsupported
from tailrace.spark.connector import CONNECTORS, connector_settings

PACKAGES, EXTENSIONS = "spark.jars.packages", "spark.sql.extensions"


def test_a_spark_without_a_connector_is_refused_with_those_that_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyspark, "__version__", "4.3.0")
    with pytest.raises(Unsupported) as refused:
        connector_settings({})
    assert refused.value.fields == {"pyspark": "4.3.0"}
    assert "pyspark==4.2.*" in refused.value.hint
    assert "engine: delta-rs" in refused.value.hint


def test_the_connector_of_the_line_is_added_to_what_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyspark, "__version__", "4.2.1")
    given = {PACKAGES: "org.example:other:1", EXTENSIONS: "org.example.Extension", "spark.driver.memory": "2g"}
    found = connector_settings(given)
    assert found[PACKAGES] == f"org.example:other:1,{CONNECTORS['4.2']}"
    assert found[EXTENSIONS] == "org.example.Extension,io.delta.sql.DeltaSparkSessionExtension"
    assert found["spark.sql.catalog.spark_catalog"].endswith("DeltaCatalog")
    assert found["spark.driver.memory"] == "2g"


@pytest.mark.parametrize("given", [{PACKAGES: "io.delta:delta-spark_9.9_2.13:1"}, {"spark.jars": "/x/delta-spark.jar"}])
def test_a_connector_that_was_named_is_left_as_it_is(given: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyspark, "__version__", "9.9.0")
    found = connector_settings(given)
    assert found.get(PACKAGES) == given.get(PACKAGES)
