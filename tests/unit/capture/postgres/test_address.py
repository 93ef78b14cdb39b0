"""A program's address and names for a server: refused before the server is asked, and never quoted."""

from __future__ import annotations

from typing import Any

import pytest

from tailrace.capture.postgres.config import PostgresSettings
from tailrace.capture.postgres.connect import connect, connect_replication
from tailrace.capture.postgres.source import PostgresCapture
from tailrace.errors import ConfigError

WELL: dict[str, Any] = {
    "url": "postgresql://app:secret@localhost/shop", "wanted": lambda _: True, "slot": "mine", "publication": "mine",
}  # fmt: skip


@pytest.mark.parametrize(
    "url",
    [
        "app:s3cret@localhost",
        "host=localhost password=s3cret",
        "mysql://app:s3cret@localhost/db",
        "",
        None,
        3,
        "postgresql://app:s3cret@[::1/db",
        "postgresql://app:s%zz3cret@h/db",
        "postgresql://app:s3@cret@localhost/db",
        "postgresql://app:s3/cret@localhost/db",
        "postgresql://app:s3 cret@localhost/db",
        "postgresql://app:s3cret@localhost:99999/db",
    ],
    ids=str,
)
def test_an_address_that_cannot_be_read_is_refused_and_nothing_of_it_is_shown(url: Any) -> None:
    for act in (connect, connect_replication, lambda url: PostgresSettings(**{**WELL, "url": url})):
        with pytest.raises(ConfigError, match="`url`") as raised:
            act(url)
        assert "postgresql://user:password@host" in raised.value.hint
        assert not raised.value.__cause__
        assert "cret" not in str(raised.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"wanted": {"public.orders"}}, "`wanted` cannot be called"),
        ({"wanted": None}, "`wanted` cannot be called"),
        ({"messages": ["mail"]}, "`messages` cannot be called"),
        ({"standby": "standby"}, "`standby` must be a URL"),
        ({"slot": "My Slot"}, "`slot` must be 1 to 63 lower-case"),
        ({"slot": "x" * 64}, "`slot` must be"),
        ({"slot": 3}, "`slot` must be"),
        ({"publication": ""}, "`publication` must be 1 to 55 bytes"),
        ({"publication": 'a"b'}, "`publication` must be"),
        ({"publication": "x" * 56}, "`publication` must be"),
    ],
    ids=str,
)
def test_a_name_that_the_server_would_refuse_or_cut_off_is_refused_before(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        PostgresSettings(**{**WELL, **given})
    assert raised.value.hint


def test_a_capture_requires_settings() -> None:
    url: Any = WELL["url"]
    with pytest.raises(ConfigError, match="not a `PostgresSettings`"):
        PostgresCapture(url)
