"""Markers that a test gets for what it uses, so that a run can leave out what needs a server, Spark or much time.

A test uses what its own code names, what the functions and classes of its module name that it calls, and what its
fixtures name. What a test hides from that (a helper elsewhere, a command) it says itself, with `pytest.mark`.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[1]
IMPORTED = {
    "pg": {"EmbeddedPostgres"},
    "spark": {"Pipeline", "Jvm", "SparkSession", "standalone", "find_java"},
    "fault": {"failpoints", "mounted", "Disk", "built", "Killed"},
}
"""Names that a module of tests has from elsewhere."""
if os.environ.get("TAILRACE_TEST_ENGINE") in ("spark", "iceberg"):
    IMPORTED["spark"] |= {"open_table", "session", "spark_engine"}
SAID = {
    "pg": ("EmbeddedPostgres",),
    "spark": ("SparkSession",),
    "fault": ("SIGKILL", "SIGSTOP", "apply_killed", "TAILRACE_FAILPOINT", "pg_terminate_backend"),
}
"""Parts of attributes and texts in the code of tests."""
SLOW_FOLDERS = ("crash", "oracle")
FAULT_FOLDERS = ("crash",)


def mark(item: pytest.Item) -> None:
    """Give a test the markers for what it uses."""
    for name in sorted(_markers(item)):
        if item.get_closest_marker(name) is None:
            item.add_marker(name)


def _markers(item: pytest.Item) -> set[str]:
    folder = item.path.relative_to(TESTS).parts[0]
    fixtures = getattr(item, "_fixtureinfo", None)
    definitions = fixtures.name2fixturedefs.values() if fixtures else ()
    imported, said = used(getattr(item, "function", None), *(each[-1].func for each in definitions))
    found = {marker for marker, names in IMPORTED.items() if names & imported}
    found |= {marker for marker, parts in SAID.items() if any(part in each for part in parts for each in said)}
    if _of_a_server(item):
        found.add("pg")
    if folder in FAULT_FOLDERS:
        found.add("fault")
    # A pipeline in processes of its own takes its time to start.
    if folder in SLOW_FOLDERS or {"pg", "spark"} <= found | {each.name for each in item.iter_markers()}:
        found.add("slow")
    return found


def _of_a_server(item: pytest.Item) -> bool:
    """A bench asks for its server only when it is the one of a server."""
    called = getattr(item, "callspec", None)
    return called is not None and called.params.get("bench") == "postgresql"


@functools.cache
def used(*functions: object) -> tuple[set[str], set[str]]:
    """What a test and its fixtures import and say, as far as their modules show it."""
    waiting: list[Any] = list(functions)
    imported, said, seen = set[str](), set[str](), set[int]()
    while waiting:
        function = _plain(waiting.pop())
        if inspect.isclass(function):
            waiting += vars(function).values()
        if not isinstance(function, FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        here_imported, here_said, here = _code_of(function)
        imported |= here_imported
        said |= here_said
        waiting += here
    return imported, said


@functools.cache
def _code_of(function: FunctionType) -> tuple[set[str], set[str], list[Any]]:
    """What a function imports and says, and the functions and classes of its module that it names."""
    imported, said, here = set[str](), set[str](), list[Any]()
    for code in _codes(function.__code__):
        said.update(code.co_names, _texts(code.co_consts))
        for name in code.co_names:
            if name not in function.__globals__:
                continue
            value = function.__globals__[name]
            said.update(_texts([value]))
            if getattr(value, "__module__", None) == function.__module__:
                here.append(value)
            else:
                imported.add(name)
    return imported, said, here


def _texts(values: Iterable[object]) -> Iterator[str]:
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, tuple):
            yield from _texts(value)


def _plain(function: Any) -> Any:
    """What decorators have wrapped."""
    inner = getattr(getattr(function, "hypothesis", None), "inner_test", function)
    try:
        return inspect.unwrap(inner) if callable(inner) else inner
    except ValueError:
        return inner


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code, and that of the functions in it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)
