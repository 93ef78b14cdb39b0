"""Checks of addresses and names, before the server gets them.

libpq quotes parts of a URL that it cannot read, the password among them, so it never gets an invalid one. The server
would cut off a name that is too long, and what was created under it would not be found again.
"""

from __future__ import annotations

import enum
import re

from tailrace.errors import ConfigError

PUBLICATION_BYTES_MAX = 63 - len("_inserts")
"""The second publication, for tables that can publish inserts only, is named after the first."""
SLOT_FORM = "1 to 63 lower-case letters, digits or `_`, as the server demands of slots"
PUBLICATION_FORM = f"1 to {PUBLICATION_BYTES_MAX} bytes of printable text without quotes and backslashes"
URL_HINT = "It looks like `postgresql://user:password@host:5432/database`."
ENCODE_HINT = "Percent-encode special characters in user and password (`@` is %40, `/` is %2F, `%` is %25)."


class UrlProblem(enum.Enum):
    """A problem of a URL, in words that contain no part of it."""

    FORM = "must be a URL that begins with `postgresql://`"
    SPACE = "must not have spaces or control characters"
    ENCODING = "has a special character in user or password that is not encoded"
    PORT = "has a port that is not a number from 1 to 65535"


def find_url_problem(url: object) -> UrlProblem | None:
    """Return what libpq could not read; None if the URL is fine."""
    scheme, separator, rest = url.partition("://") if isinstance(url, str) else ("", "", "")
    if not separator or scheme not in ("postgresql", "postgres"):
        return UrlProblem.FORM
    if re.search(r"[\s\x00-\x1f\x7f]", rest):
        return UrlProblem.SPACE
    authority = re.split(r"[/?]", rest, maxsplit=1)[0]
    if authority.count("@") > 1 or re.search(r"%(?![0-9A-Fa-f]{2})", authority):
        return UrlProblem.ENCODING
    for host in authority.rpartition("@")[2].split(","):
        port = re.sub(r"^(\[[^\]]*\]|[^:]*):?", "", host)
        if port and not (re.fullmatch(r"[0-9]{1,5}", port) and 0 < int(port) < 65536):
            return UrlProblem.PORT
    return None


def require_url(what: str, url: object) -> None:
    """Refuse a value that is not a server's address."""
    wrong = find_url_problem(url)
    if wrong is not None:
        hint = URL_HINT if wrong is UrlProblem.FORM else f"{URL_HINT} {ENCODE_HINT}"
        raise ConfigError(f"`{what}` {wrong.value}", hint=hint)


def is_slot_name(name: object) -> bool:
    return isinstance(name, str) and re.fullmatch(r"[a-z0-9_]{1,63}", name) is not None


def is_publication_name(name: object) -> bool:
    if not isinstance(name, str) or not 0 < len(name.encode()) <= PUBLICATION_BYTES_MAX:
        return False
    return name.isprintable() and not re.search(r"[\"'\\]", name)
