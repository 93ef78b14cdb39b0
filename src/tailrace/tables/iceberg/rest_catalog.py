"""What a REST catalog says of a table, asked without Java and as the same client that Iceberg's connector is.

The properties are the connector's. Who asks is shown by `token`; or by `credential`, which is given for a token, at the
catalog or at `oauth2-server-uri`. `header.*` go with every request. A token is kept in this process for as long as it
is good, and another one is got, once, if the catalog does not take it.

No secret leaves by an error: its reason is a status or a word of ours, and what was sent or answered is in no cause.
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
"""For a server to answer."""
TOKEN_SECONDS = 3600.0
"""A token is used for so long if its server does not say how long it is good."""
_EARLY_SECONDS, _EARLY_SHARE = 60.0, 0.1
"""Before its end a token is not used any more: the lesser of both."""
_ERROR_BYTES_MAX = 65_536
_TOKENS_MAX = 64
_LEVELS = "\x1f"
"""Between the levels of a namespace."""
_TOKENS_PATH = "v1/oauth/tokens"
_OAUTH_ERRORS = (
    "invalid_request", "invalid_client", "invalid_grant", "unauthorized_client", "unsupported_grant_type",
    "invalid_scope",
)  # fmt: skip
"""RFC 6749, 5.2. Any other word might be an echo of what was sent."""


class Unanswered(Exception):
    """The catalog did not say; the reason may be shown to anybody."""

    def __init__(self, reason: str, *, status: int | None = None) -> None:
        super().__init__(reason)
        self.reason, self.status = reason, status


def load_table(
    uri: str, warehouse: str, properties: Mapping[str, str], namespace: Sequence[str], name: str
) -> dict[str, Any] | None:
    """What is known of a table; None if there is none."""
    where = f"?{urlencode({'warehouse': warehouse})}" if warehouse else ""
    # Every catalog has one: where none is, nothing that is said to be missing says anything of tables.
    config = _Client(uri, who=properties, headers=_headers(properties)).get(f"v1/config{where}")
    said = {**_texts(config.get("defaults")), **properties, **_texts(config.get("overrides"))}
    # Whom we show our credential to is for the settings to say, and not for an answer.
    client = _Client(uri, who=properties if properties.get("credential") else said, headers=_headers(said))
    prefix = f"{quote(said['prefix'], safe='')}/" if said.get("prefix") else ""
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
    """Who asks, and whom."""

    uri: str = field(repr=False)
    who: Mapping[str, str] = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)

    def get(self, path: str) -> dict[str, Any]:
        """What the catalog answers."""
        kind = self.who.get("rest.auth.type", "oauth2").lower()
        if kind not in ("oauth2", "none"):
            raise Unanswered("a `rest.auth.type` that only the connector knows")
        url, asked = f"{self.uri}/{path}", self._exchange()
        if asked is None or kind == "none":
            return _answer(url, self._with(self.who.get("token") if kind == "oauth2" else None))
        token = asked.token()
        try:
            return _answer(url, self._with(token))
        except Unanswered as error:
            if error.status != 401:
                raise
        asked.forget(token)
        return _answer(url, self._with(asked.token()))

    def _exchange(self) -> _Exchange | None:
        """How a token is got; None where there is nothing to give for one."""
        credential = self.who.get("credential")
        if not credential:
            return None
        client, colon, secret = (part.strip() for part in credential.partition(":"))
        form = {"grant_type": "client_credentials", "client_id": client, "client_secret": secret}
        if not colon:
            form = {"grant_type": "client_credentials", "client_secret": client}
        form["scope"] = self.who.get("scope", "catalog")
        form |= {name: self.who[name] for name in ("audience", "resource") if name in self.who}
        where = self.who.get("oauth2-server-uri") or _TOKENS_PATH
        if not where.startswith(("http://", "https://")):
            where = f"{self.uri}/{where.lstrip('/')}"
        return _Exchange(where, tuple(form.items()), self._with(self.who.get("token")))

    def _with(self, token: str | None) -> dict[str, str]:
        return {**self.headers, **({"Authorization": f"Bearer {token}"} if token else {})}


_tokens: dict[tuple[str, tuple[tuple[str, str], ...]], tuple[str, float]] = {}
"""By who asks and where: a token, and until when it is used."""
_lock = threading.Lock()


@dataclass(frozen=True)
class _Exchange:
    """A credential that is given for a token."""

    url: str = field(repr=False)
    form: tuple[tuple[str, str], ...] = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)

    def token(self) -> str:
        with _lock:
            kept, until = _tokens.get((self.url, self.form), ("", 0.0))
        if monotonic() < until:
            return kept
        begun = monotonic()
        try:
            found = _answer(self.url, self.headers, urlencode(self.form).encode())
        except Unanswered as error:
            raise Unanswered(f"{error.reason}, when asked for a token") from None
        token, seconds = found.get("access_token"), found.get("expires_in")
        if not isinstance(token, str) or not token:
            raise Unanswered("no token in the answer, when asked for one")
        good = float(seconds) if isinstance(seconds, (int, float)) and seconds > 0 else TOKEN_SECONDS
        with _lock:
            while len(_tokens) >= _TOKENS_MAX:
                _tokens.pop(next(iter(_tokens)))
            _tokens[self.url, self.form] = token, begun + good - min(_EARLY_SECONDS, good * _EARLY_SHARE)
        return token

    def forget(self, token: str) -> None:
        """Not one that another has got meanwhile."""
        with _lock:
            if _tokens.get((self.url, self.form), ("", 0.0))[0] == token:
                del _tokens[self.url, self.form]


def _answer(url: str, headers: Mapping[str, str], form: bytes | None = None) -> dict[str, Any]:
    """What is answered to a GET or, with a form, to a POST."""
    request = urllib.request.Request(url, data=form, headers={"Accept": "application/json"})
    for name, value in headers.items():
        # Python's own error would repeat it.
        if not re.fullmatch(r"[\w!#$%&'*+.^`|~-]+", name, re.ASCII) or not re.fullmatch(r"[ -~\xa0-\xff]*", value):
            raise Unanswered("a token or a header that HTTP cannot carry")
        request.add_unredirected_header(name, value)  # nobody else is shown it
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS_MAX) as answer:  # settings allow http and https
            found = json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            raise Unanswered(f"HTTP {error.code}{_oauth_error(error)}", status=error.code) from None
    except (OSError, http.client.HTTPException) as error:
        raise Unanswered(type(error).__name__) from None
    except ValueError:
        raise Unanswered("an answer that is not JSON") from None
    if not isinstance(found, dict):
        raise Unanswered("an answer of another kind")
    return found


def _oauth_error(error: urllib.error.HTTPError) -> str:
    try:
        found = json.loads(error.read(_ERROR_BYTES_MAX))["error"]
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return ""
    return f" ({found})" if found in _OAUTH_ERRORS else ""
