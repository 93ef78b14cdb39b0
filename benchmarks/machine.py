"""The machine a figure was measured on. A figure without it cannot be compared with anything."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

LIBRARIES = ("tailrace", "psycopg", "psycopg-binary", "pyarrow", "numba", "numpy")


def describe(log_folder: Path) -> dict[str, Any]:
    """CPU, cores, memory, kernel, library versions, and the file system that our log is fsynced to."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": f"{platform.system()} {platform.release()}",
        "load_1min_at_start": round(os.getloadavg()[0], 2),
        "log_filesystem": _filesystem(log_folder),
        "versions": {"python": platform.python_version(), **_library_versions()},
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _filesystem(folder: Path) -> str:
    """Name the type of the file system: on tmpfs an fsync costs nothing, so the figure would flatter us."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return "unknown"
    holding = [(len(point), kind) for point, kind in mounts if folder.resolve().is_relative_to(point)]
    return max(holding)[1] if holding else "unknown"


def _library_versions() -> dict[str, str]:
    versions = {}
    for library in LIBRARIES:
        try:
            versions[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            versions[library] = "not installed"
    return versions
