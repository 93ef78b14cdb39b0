"""Errors are a contract: each code is documented, and an error survives the transfer between processes."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from tailrace import errors
from tailrace.errors import PositionLost, Remedy, TailraceError
from tailrace.model.position import Lsn
from tailrace.model.schema import TableId
from tailrace.pipeline.report import error_from_json, error_to_json


def every_kind(root: type[TailraceError] = TailraceError) -> list[type[TailraceError]]:
    return [root] + [kind for child in root.__subclasses__() for kind in every_kind(child)]


@pytest.mark.parametrize("kind", every_kind())
def test_every_code_is_documented_and_leads_back_to_its_class(kind: type[TailraceError]) -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "errors.md"
    assert f"| `{kind.code}` |" in page.read_text()
    assert errors.error_class(kind.code) is kind
    assert isinstance(kind.remedy, Remedy)


def test_an_error_is_the_same_after_pickling_and_as_json() -> None:
    error = PositionLost("it is gone", hint="Do this.", slot="s", at=Lsn(0x18F9C00), table=TableId("a", "b.c"))
    said = "it is gone (slot=s, at=0/18F9C00, table=a.b.c)"
    for again in (pickle.loads(pickle.dumps(error)), error_from_json(error_to_json(error))):
        assert type(again) is PositionLost
        assert (again.headline, again.hint) == (said, "Do this.")
        assert str(again) == f"{said} [position-lost] | hint: Do this."


def test_a_code_of_a_later_version_is_still_an_error() -> None:
    assert errors.error_class("from-the-future") is TailraceError
