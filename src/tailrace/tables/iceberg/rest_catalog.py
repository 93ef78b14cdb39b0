"""Read a table's metadata from a REST catalog without Java, as Iceberg's connector does.

The properties are the connector's. The client authenticates with `token`, or with `credential`, which is exchanged for
a token at the catalog or at `oauth2-server-uri`. `header.*` are sent with every request. A token is kept in this
process while it is valid. If the catalog rejects it, another one is requested, once.

No secret is ever in an error: its reason is a status or a word of ours. Requests and responses are in no error's cause.
"""

from __future__ import annotations

import http.client
import json
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any
from urllib.parse import quote, urlencode

ANSWER_SECONDS_MAX = 30.0
"""Time limit for a server's response."""
TOKEN_SECONDS = 3600.0
"""Lifetime of a token whose server does not state one."""
_EARLY_SECONDS, _EARLY_SHARE = 60.0, 0.1
"""A token's reserve: seconds, or a share of its lifetime if that is less.

A token is not used in that time before its end.
"""
_ERROR_BYTES_MAX = 65_536
_TOKENS_MAX = 64
_LEVELS = "\x1f"
"""Separator between the levels of a namespace."""
_TOKENS_PATH = "v1/oauth/tokens"
_OAUTH_ERRORS = (
    "invalid_request", "invalid_client", "invalid_grant", "unauthorized_client", "unsupported_grant_type",
    "invalid_scope",
)  # fmt: skip
"""From RFC 6749, 5.2. Any other word might echo what was sent."""


class Unanswered(Exception):
    """The catalog gave no answer; the reason has no secrets."""

    def __init__(self, reason: str, *, status: int | None = None) -> None:
        super().__init__(reason)
        self.reason, self.status = reason, status


def load_table(
    uri: str, warehouse: str, properties: Mapping[str, str], namespace: Sequence[str], name: str
) -> dict[str, Any] | None:
    """Return a table's metadata; None without a table."""
    where = f"?{urlencode({'warehouse': warehouse})}" if warehouse else ""
    # Every catalog has a config. Without one, a 404 later would not mean that the table is missing.
    config = _Client(uri, auth=properties, headers=_headers(properties)).get(f"v1/config{where}")
    merged = {**_texts(config.get("defaults")), **properties, **_texts(config.get("overrides"))}
    # Only the settings decide which server gets our credential, never a response.
    client = _Client(uri, auth=properties if properties.get("credential") else merged, headers=_headers(merged))
    prefix = f"{quote(merged['prefix'], safe='')}/" if merged.get("prefix") else ""
    path = f"v1/{prefix}namespaces/{quote(_LEVELS.join(namespace), safe='')}/tables/{quote(name, safe='')}"
    try:
        return client.get(path)
    except Unanswered as error:
        if error.status == 404:
            return None
        raise


def _texts(answered: Any) -> dict[str, str]:
    return {name: value for name, value in dict(answered or {}).items() if isinstance(value, str)}


def _headers(properties: Mapping[str, str]) -> dict[str, str]:
    return {name.removeprefix("header."): value for name, value in properties.items() if name.startswith("header.")}


@dataclass(frozen=True)
class _Client:
    """The client's identity and the server it talks to."""

    uri: str = field(repr=False)
    auth: Mapping[str, str] = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)

    def get(self, path: str) -> dict[str, Any]:
        """Return the catalog's response."""
        kind = self.auth.get("rest.auth.type", "oauth2").lower()
        if kind not in ("oauth2", "none"):
            raise Unanswered("unsupported `rest.auth.type`")
        url, exchange = f"{self.uri}/{path}", self._exchange()
        if exchange is None or kind == "none":
            return _request(url, self._with(self.auth.get("token") if kind == "oauth2" else None))
        token = exchange.token()
        try:
            return _request(url, self._with(token))
        except Unanswered as error:
            if error.status != 401:
                raise
        exchange.forget(token)
        return _request(url, self._with(exchange.token()))

    def _exchange(self) -> _Exchange | None:
        """Return the token exchange; None without a credential."""
        credential = self.auth.get("credential")
        if not credential:
            return None
        client, colon, secret = (part.strip() for part in credential.partition(":"))
        form = {"grant_type": "client_credentials", "client_id": client, "client_secret": secret}
        if not colon:
            form = {"grant_type": "client_credentials", "client_secret": client}
        form["scope"] = self.auth.get("scope", "catalog")
        form |= {name: self.auth[name] for name in ("audience", "resource") if name in self.auth}
        where = self.auth.get("oauth2-server-uri") or _TOKENS_PATH
        if not where.startswith(("http://", "https://")):
            where = f"{self.uri}/{where.lstrip('/')}"
        return _Exchange(where, tuple(form.items()), self._with(self.auth.get("token")))

    def _with(self, token: str | None) -> dict[str, str]:
        return {**self.headers, **({"Authorization": f"Bearer {token}"} if token else {})}


_tokens: dict[tuple[str, tuple[tuple[str, str], ...]], tuple[str, float]] = {}
"""Tokens and the times until which they are used, by URL and request fields."""
_lock = threading.Lock()


@dataclass(frozen=True)
class _Exchange:
    """An exchange of a credential for a token."""

    url: str = field(repr=False)
    form: tuple[tuple[str, str], ...] = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)

    def token(self) -> str:
        with _lock:
            kept, until = _tokens.get((self.url, self.form), ("", 0.0))
        if monotonic() < until:
            return kept
        started_at = monotonic()
        try:
            found = _request(self.url, self.headers, urlencode(self.form).encode())
        except Unanswered as error:
            raise Unanswered(f"{error.reason}, when requesting a token") from None
        token, seconds = found.get("access_token"), found.get("expires_in")
        if not isinstance(token, str) or not token:
            raise Unanswered("no token in the response, when requesting one")
        good = float(seconds) if isinstance(seconds, (int, float)) and seconds > 0 else TOKEN_SECONDS
        with _lock:
            while len(_tokens) >= _TOKENS_MAX:
                _tokens.pop(next(iter(_tokens)))
            _tokens[self.url, self.form] = token, started_at + good - min(_EARLY_SECONDS, good * _EARLY_SHARE)
        return token

    def forget(self, token: str) -> None:
        """Drop this token, but not a newer one from another thread."""
        with _lock:
            if _tokens.get((self.url, self.form), ("", 0.0))[0] == token:
                del _tokens[self.url, self.form]


def _request(url: str, headers: Mapping[str, str], form: bytes | None = None) -> dict[str, Any]:
    """Return the response to a GET or, with form fields, to a POST."""
    request = urllib.request.Request(url, data=form, headers={"Accept": "application/json"})
    for name, value in headers.items():
        # Python's own error would quote the value.
        if not re.fullmatch(r"[\w!#$%&'*+.^`|~-]+", name, re.ASCII) or not re.fullmatch(r"[ -~\xa0-\xff]*", value):
            raise Unanswered("invalid characters in a token or header")
        request.add_unredirected_header(name, value)  # not sent to another server on a redirect
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS_MAX) as answer:  # settings allow http and https
            found = json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            raise Unanswered(f"HTTP {error.code}{_oauth_error(error)}", status=error.code) from None
    except (OSError, http.client.HTTPException) as error:
        raise Unanswered(type(error).__name__) from None
    except ValueError:
        raise Unanswered("the response is not JSON") from None
    if not isinstance(found, dict):
        raise Unanswered("the response is not a JSON object")
    return found


def _oauth_error(error: urllib.error.HTTPError) -> str:
    try:
        found = json.loads(error.read(_ERROR_BYTES_MAX))["error"]
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return ""
    return f" ({found})" if found in _OAUTH_ERRORS else ""
