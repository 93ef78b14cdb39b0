"""Which markers a test gets by itself; a test that named what it looks for would get them, too."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import marks

(SERVER,) = sorted(marks.IMPORTED["pg"])


def function(text: str, name: str = "f", module: str = "m", **known: Any) -> Any:
    """A function of a module that knows these names."""
    names = {"__name__": module, **known}
    exec(text, names)
    return names[name]


@pytest.mark.parametrize("text", [f"{SERVER}()", f"[{SERVER} for _ in '']", f"def g(): return {SERVER}"])
def test_what_a_test_names_counts_where_its_module_imports_it(text: str) -> None:
    body = f"def f():\n    {text}\n"
    known: dict[str, Any] = {SERVER: type(SERVER, (), {"__module__": "elsewhere"})}
    assert SERVER in marks.used(function(body, **known))[0]
    assert SERVER not in marks.used(function(body))[0]


def test_what_the_helpers_and_the_fixtures_of_a_module_name_counts_too() -> None:
    known: dict[str, Any] = {SERVER: type(SERVER, (), {"__module__": "elsewhere"})}
    started = function(f"class Started:\n    def begin(self): return {SERVER}()\n", "Started", **known)
    test = function("def f():\n    Started()\n", Started=started)
    assert SERVER in marks.used(test)[0]
    fixture = function(f"def shop():\n    yield {SERVER}()\n", "shop", **known)
    assert SERVER in marks.used(function("def f(shop): ...\n"), fixture)[0]
    helper_elsewhere = function("def f():\n    Started()\n", module="n", Started=started)
    assert SERVER not in marks.used(helper_elsewhere)[0]


def test_texts_of_a_test_and_of_its_module_are_known() -> None:
    said = marks.used(function("def f():\n    run(SCRIPT, {'armed': 1, 'other': 2})\n", SCRIPT="import armed_here"))[1]
    assert {"armed", "other", "import armed_here"} <= said


def test_this_module_needs_nothing(request: pytest.FixtureRequest) -> None:
    assert not {"pg", "spark", "slow", "fault"} & {mark.name for mark in request.node.iter_markers()}
