"""Let Spark find `format("cdc")` without an import.

Spark loads modules named `pyspark_*` and takes their `DefaultSource`.
"""

from __future__ import annotations

from tailrace.pipeline.datasource import CdcSource as DefaultSource

__all__ = ["DefaultSource"]
