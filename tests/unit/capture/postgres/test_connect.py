"""A server's messages become errors of ours, with the remedy."""

from __future__ import annotations

import pytest

from tailrace.capture.postgres.connect import map_error_text
from tailrace.errors import (
    SourceError,
    SourceRefused,
    SourceRewritten,
    SourceSlow,
    SourceUnreachable,
    TailraceError,
    Unsupported,
)


@pytest.mark.parametrize(
    ("text", "state", "kind"),
    [
        ("whatever it says", "28P01", SourceRefused),
        ('FATAL: database "shop" does not exist', "", SourceRefused),
        ('FATAL: role "shop" does not exist', "", SourceRefused),
        ('relation "shop" does not exist', "42P01", SourceError),
        ("invalid byte sequence", "22021", Unsupported),
        ("canceling statement due to lock timeout", "55P03", SourceSlow),
        ("could not open relation with OID 16384", "XX000", SourceRewritten),
        ("division by zero", "22012", SourceError),
        ("terminating connection", "57P01", SourceUnreachable),
        ("connection refused", "", SourceUnreachable),
    ],
)
def test_a_refusal_is_recognized_by_its_text_or_sqlstate(text: str, state: str, kind: type[TailraceError]) -> None:
    error = map_error_text(text, "postgresql://user:secret@db:5433/shop", state)
    assert type(error) is kind
    assert error.hint
    assert error.fields["source"] == "db:5433/shop"


def test_a_message_that_would_show_a_value_is_not_repeated() -> None:
    error = map_error_text('invalid input syntax for type integer: "4711"', "", "22P02")
    assert "4711" not in str(error)
