"""`format("cdc")` with no import: Spark looks for `pyspark_*` modules, and takes the `DefaultSource` that they have."""

from __future__ import annotations

from tailrace.pipeline.datasource import CdcSource as DefaultSource

__all__ = ["DefaultSource"]
