"""How a REST catalog is shown who asks: by a token, or by a credential that is given for one."""

from __future__ import annotations

import json
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.parse import parse_qsl

import pytest

from tailrace.errors import TableUnusable
from tailrace.tables.iceberg import rest_catalog
from tailrace.tables.iceberg.catalogs import Catalog

CREDENTIAL = "us:s3cret"
FORM = {"grant_type": "client_credentials", "client_id": "us", "client_secret": "s3cret", "scope": "catalog"}


@dataclass
class Server:
    """A catalog of one table that wants a token, and gives tokens away; what it was asked, it remembers."""

    good: set[str] = field(default_factory=set)
    """Tokens that it takes."""
    forms: list[dict[str, str]] = field(default_factory=list)
    asked: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    answer: tuple[int, Any] | None = None
    """To whoever wants a token."""
    expires_in: float | None = 3600
    uri: str = ""

    def respond(self, method: str, path: str, headers: dict[str, str], body: str) -> tuple[int, Any]:
        self.asked.append((method, path, headers))
        if method == "POST":
            self.forms.append(dict(parse_qsl(body)))
            self.good = {f"t0ken-{len(self.forms)}"}
            given = {"access_token": min(self.good), "token_type": "bearer", "expires_in": self.expires_in}
            return self.answer or (200, {name: value for name, value in given.items() if value is not None})
        if headers.get("authorization", "").removeprefix("Bearer ") not in self.good:
            return 401, {"error": {"message": f"what is {headers.get('authorization')}?", "code": 401}}
        if path.startswith("/v1/config"):
            return 200, self.config
        return (200, {"metadata": {"format-version": 5}}) if path == "/v1/namespaces/public/tables/t" else (404, {})

    @contextmanager
    def listening(self) -> Iterator[Server]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._respond("GET")

            def do_POST(self) -> None:
                self._respond("POST")

            def _respond(self, method: str) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
                headers = {name.lower(): value for name, value in self.headers.items()}
                status, said = server.respond(method, self.path, headers, body)
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", said)
                self.end_headers()
                self.wfile.write(said.encode() if isinstance(said, str) else json.dumps(said).encode())

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing."""

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
            thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
            thread.start()
            self.uri = f"http://127.0.0.1:{listening.server_port}"
            try:
                yield self
            finally:
                listening.shutdown()
                thread.join()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(rest_catalog, "_tokens", {})  # another may have had the same port
    with Server().listening() as found:
        yield found


def look(server: Server, name: str = "t", **properties: str) -> dict[str, Any] | None:
    given = {name.replace("__", "-"): value for name, value in properties.items()}
    root = Path("/lake")
    return Catalog(kind="rest", root=root, uri=server.uri, properties=given).metadata(root / "public" / name)


def refused(server: Server, **properties: str) -> str:
    """What is said; no secret is, nor by what caused it."""
    with pytest.raises(TableUnusable, match="catalog cannot be read") as caught:
        look(server, **properties)
    shown = "".join(traceback.format_exception(caught.value))
    assert not any(secret in shown for secret in ("s3cret", "t0ken"))
    return str(caught.value)


def test_a_credential_is_given_for_a_token_which_serves_for_all_that_is_asked(server: Server) -> None:
    assert look(server, credential=CREDENTIAL) == {"format-version": 5}
    assert look(server, "other", credential=CREDENTIAL) is None
    assert server.forms == [FORM]
    assert [path for method, path, _ in server.asked if method == "POST"] == ["/v1/oauth/tokens"]
    assert {headers["authorization"] for method, _, headers in server.asked if method == "GET"} == {"Bearer t0ken-1"}


def test_a_token_is_got_anew_before_its_end(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.expires_in = 100
    now = monotonic()
    monkeypatch.setattr(rest_catalog, "monotonic", lambda: now)
    look(server, credential=CREDENTIAL)
    now += 89
    look(server, credential=CREDENTIAL)
    assert len(server.forms) == 1
    now += 2
    look(server, credential=CREDENTIAL)
    assert len(server.forms) == 2


def test_a_token_without_an_end_is_used_for_an_hour(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.expires_in = None
    now = monotonic()
    monkeypatch.setattr(rest_catalog, "monotonic", lambda: now)
    look(server, credential=CREDENTIAL)
    now += rest_catalog.TOKEN_SECONDS - 61
    look(server, credential=CREDENTIAL)
    assert len(server.forms) == 1
    now += 2
    look(server, credential=CREDENTIAL)
    assert len(server.forms) == 2


def test_a_token_that_is_not_taken_any_more_is_got_anew_once(server: Server) -> None:
    look(server, credential=CREDENTIAL)
    server.good = set()
    assert look(server, credential=CREDENTIAL) == {"format-version": 5}
    assert len(server.forms) == 2


def test_a_catalog_that_takes_no_token_is_not_asked_for_ever(server: Server) -> None:
    server.answer = 200, {"access_token": "t0ken-wrong"}
    assert "HTTP 401" in refused(server, credential=CREDENTIAL)
    assert [method for method, _, _ in server.asked] == ["POST", "GET", "POST", "GET"]


def test_what_the_connector_knows_of_oauth_is_known_here(server: Server) -> None:
    with Server().listening() as tokens:
        tokens.answer = 200, {"access_token": "elsewhere", "expires_in": 3600}
        server.good = {"elsewhere"}
        given = {"oauth2__server__uri": f"{tokens.uri}/realm/token", "scope": "a b", "audience": "x", "resource": "y"}
        assert look(server, credential=" s3cret ", token="first", **given) == {"format-version": 5}
    ((_, path, headers),) = tokens.asked
    assert (path, headers["authorization"], server.forms) == ("/realm/token", "Bearer first", [])
    assert tokens.forms == [
        {
            "grant_type": "client_credentials",
            "client_secret": "s3cret",
            "scope": "a b",
            "audience": "x",
            "resource": "y",
        }
    ]


def test_where_tokens_are_had_may_be_said_as_a_place_of_the_catalog(server: Server) -> None:
    look(server, credential=CREDENTIAL, oauth2__server__uri="other/tokens")
    assert server.asked[0][1] == "/other/tokens"


def test_headers_go_with_every_request(server: Server) -> None:
    look(server, credential=CREDENTIAL, **{"header.X-Tenant": "shop"})
    assert [headers.get("x-tenant") for _, _, headers in server.asked] == ["shop"] * 3


def test_a_catalogs_own_word_counts_more_than_ours_but_not_for_who_sees_our_credential(server: Server) -> None:
    server.config = {
        "defaults": {"header.X-A": "theirs", "header.X-B": "theirs", "prefix": None},
        "overrides": {"header.X-C": "theirs", "oauth2-server-uri": "http://127.0.0.1:1/elsewhere", "scope": "theirs"},
    }
    given = {"header.X-A": "ours", "header.X-C": "ours"}
    assert look(server, credential=CREDENTIAL, **given) == {"format-version": 5}
    headers = server.asked[-1][2]
    assert [headers[name] for name in ("x-a", "x-b", "x-c")] == ["ours", "theirs", "theirs"]
    assert server.forms == [FORM]


def test_a_catalog_may_give_a_token_with_its_settings(server: Server) -> None:
    server.good, server.config = {"first", "second"}, {"overrides": {"token": "second"}}
    assert look(server, token="first") == {"format-version": 5}
    assert [headers["authorization"] for _, _, headers in server.asked] == ["Bearer first", "Bearer second"]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((401, {"error": "invalid_client", "error_description": "us:s3cret"}), "HTTP 401 (invalid_client), when asked"),
        ((400, {"error": "s3cret"}), "HTTP 400, when requesting a token"), ((404, {}), "HTTP 404, when asked"),
        ((200, {"token": "t0ken"}), "no token in the response"), ((200, "s3cret"), "not JSON, when asked"),
        ((200, ["s3cret"]), "not a JSON object"),
    ],
)  # fmt: skip
def test_a_token_that_is_not_had_is_an_error_and_never_a_new_table(
    server: Server, answer: tuple[int, Any], said: str
) -> None:
    server.answer = answer
    assert said in refused(server, credential=CREDENTIAL)


@pytest.mark.parametrize(
    ("properties", "said"),
    [
        ({}, "HTTP 401"), ({"token": "s3cret-t0ken"}, "HTTP 401"), ({"token": "s3cret\n"}, "invalid characters"),
        ({"header.X-Key": "s3cret\u20ac", "token": "x"}, "invalid characters"),
        ({"credential": CREDENTIAL, "rest.auth.type": "sigv4"}, "unsupported"),
        ({"token": "x", "rest.auth.type": "none"}, "HTTP 401"),
    ],
)  # fmt: skip
def test_what_does_not_show_who_asks_is_told_without_a_secret(
    server: Server, properties: dict[str, str], said: str
) -> None:
    assert said in refused(server, **properties)


def test_an_address_where_no_catalog_is_is_an_error_and_never_a_new_table(server: Server) -> None:
    server.good = {"t0ken"}
    assert look(server, "other", token="t0ken") is None
    server.uri += "/elsewhere"
    server.respond = lambda *_: (404, "default backend - 404")  # type: ignore[method-assign] # as a gateway does
    assert "HTTP 404" in refused(server, token="t0ken")


def test_a_server_that_hangs_up_or_an_address_that_is_none_is_told_without_a_secret(server: Server) -> None:
    for uri in ("http://us:s3cret@127.0.0.1", "http://127.0.0.1:1/s3cret"):
        server.uri = uri
        refused(server, credential=CREDENTIAL)


def test_whoever_we_are_sent_on_to_is_not_shown_who_we_are(server: Server) -> None:
    with Server().listening() as another:
        server.respond = lambda *_: (302, f"{another.uri}/v1/config")  # type: ignore[method-assign] # it sends on
        refused(server, token="t0ken", **{"header.X-Key": "s3cret"})
        ((_, _, headers),) = another.asked
    assert not {"authorization", "x-key"} & set(headers)


def test_processes_that_are_sent_a_catalog_show_no_secret_of_it(server: Server) -> None:
    catalog = Catalog(kind="rest", root=Path("/lake"), uri=server.uri, properties={"credential": CREDENTIAL})
    assert "s3cret" not in repr(catalog)
