"""Any module can be imported first: modules do not import each other in a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"


def names() -> dict[str, Path]:
    """Every module of the package, and its file."""
    files = {".".join(path.relative_to(SRC).with_suffix("").parts): path for path in SRC.glob("tailrace/**/*.py")}
    return {name.removesuffix(".__init__"): path for name, path in files.items()}


def imports(tree: ast.Module, known: dict[str, Path]) -> Iterator[str]:
    """The modules that a module needs while it is imported; not those that its functions import when they run."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            for item in node.names:
                full = f"{node.module}.{item.name}"
                yield full if full in known else node.module
        elif isinstance(node, ast.Import):
            yield from (item.name for item in node.names)


def order(graph: dict[str, set[str]]) -> list[str]:
    return list(TopologicalSorter(graph).static_order())


def test_no_modules_import_each_other() -> None:
    known = names()
    graph = {
        name: {one for one in imports(ast.parse(path.read_text()), known) if one in known and one != name}
        for name, path in known.items()
    }
    assert len(order(graph)) == len(known) > 250


def test_a_circle_is_found() -> None:
    with pytest.raises(CycleError):
        order({"a": {"b"}, "b": {"c"}, "c": {"a"}})
