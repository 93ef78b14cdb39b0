"""The public names are a contract: this list changes only together with CHANGELOG.md."""

from __future__ import annotations

import subprocess
import sys

import tailrace

PUBLIC = {
    "Capabilities", "CdcRuntime", "CdcSource", "ChangeBatch", "ChangeCapture", "ChangeLog", "Column", "Event",
    "ExitCode", "Identity", "Lag", "LogWriter", "Lsn", "MemoryCapture", "Operation", "PostgresCapture",
    "PostgresSettings", "Remedy", "SourceId", "Stream", "TableId", "TableSchema", "TailraceError", "Window",
    "tables_at",
}  # fmt: skip


def test_the_public_names_are_these_and_each_can_be_had() -> None:
    assert set(tailrace.__all__) == PUBLIC
    assert all(getattr(tailrace, name) is not None for name in PUBLIC)


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import sys, tailrace; print({'pyspark', 'numba', 'pyarrow', 'deltalake'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
