"""Authentication at a REST catalog: by a token, or by a credential exchanged for one."""

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
    """A catalog of one table that requires a token and issues tokens. It records its requests."""

    good: set[str] = field(default_factory=set)
    """Tokens that it accepts."""
    forms: list[dict[str, str]] = field(default_factory=list)
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    answer: tuple[int, Any] | None = None
    """Its response to a token request."""
    expires_in: float | None = 3600
    uri: str = ""

    def respond(self, method: str, path: str, headers: dict[str, str], body: str) -> tuple[int, Any]:
        self.requests.append((method, path, headers))
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
    monkeypatch.setattr(rest_catalog, "_tokens", {})  # another test may have used the same port
    with Server().listening() as found:
        yield found


def look(server: Server, name: str = "t", **properties: str) -> dict[str, Any] | None:
    given = {name.replace("__", "-"): value for name, value in properties.items()}
    root = Path("/lake")
    return Catalog(kind="rest", root=root, uri=server.uri, properties=given).metadata(root / "public" / name)


def refused(server: Server, **properties: str) -> str:
    """Return the error's text; neither it nor its causes have a secret."""
    with pytest.raises(TableUnusable, match="catalog cannot be read") as caught:
        look(server, **properties)
    shown = "".join(traceback.format_exception(caught.value))
    assert not any(secret in shown for secret in ("s3cret", "t0ken"))
    return str(caught.value)


def test_a_credential_is_exchanged_once_for_a_token_for_all_requests(server: Server) -> None:
    assert look(server, credential=CREDENTIAL) == {"format-version": 5}
    assert look(server, "other", credential=CREDENTIAL) is None
    assert server.forms == [FORM]
    assert [path for method, path, _ in server.requests if method == "POST"] == ["/v1/oauth/tokens"]
    assert {headers["authorization"] for method, _, headers in server.requests if method == "GET"} == {"Bearer t0ken-1"}


def test_a_token_is_renewed_before_its_end(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_rejected_token_is_renewed_once(server: Server) -> None:
    look(server, credential=CREDENTIAL)
    server.good = set()
    assert look(server, credential=CREDENTIAL) == {"format-version": 5}
    assert len(server.forms) == 2


def test_a_catalog_that_rejects_every_token_is_not_asked_forever(server: Server) -> None:
    server.answer = 200, {"access_token": "t0ken-wrong"}
    assert "HTTP 401" in refused(server, credential=CREDENTIAL)
    assert [method for method, _, _ in server.requests] == ["POST", "GET", "POST", "GET"]


def test_the_connector_s_oauth_properties_are_supported(server: Server) -> None:
    with Server().listening() as tokens:
        tokens.answer = 200, {"access_token": "elsewhere", "expires_in": 3600}
        server.good = {"elsewhere"}
        given = {"oauth2__server__uri": f"{tokens.uri}/realm/token", "scope": "a b", "audience": "x", "resource": "y"}
        assert look(server, credential=" s3cret ", token="first", **given) == {"format-version": 5}
    ((_, path, headers),) = tokens.requests
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


def test_the_token_endpoint_may_be_a_path_at_the_catalog(server: Server) -> None:
    look(server, credential=CREDENTIAL, oauth2__server__uri="other/tokens")
    assert server.requests[0][1] == "/other/tokens"


def test_headers_are_sent_with_every_request(server: Server) -> None:
    look(server, credential=CREDENTIAL, **{"header.X-Tenant": "shop"})
    assert [headers.get("x-tenant") for _, _, headers in server.requests] == ["shop"] * 3


def test_a_catalog_overrides_settings_but_not_where_our_credential_is_sent(server: Server) -> None:
    server.config = {
        "defaults": {"header.X-A": "theirs", "header.X-B": "theirs", "prefix": None},
        "overrides": {"header.X-C": "theirs", "oauth2-server-uri": "http://127.0.0.1:1/elsewhere", "scope": "theirs"},
    }
    given = {"header.X-A": "ours", "header.X-C": "ours"}
    assert look(server, credential=CREDENTIAL, **given) == {"format-version": 5}
    headers = server.requests[-1][2]
    assert [headers[name] for name in ("x-a", "x-b", "x-c")] == ["ours", "theirs", "theirs"]
    assert server.forms == [FORM]


def test_a_catalog_may_return_a_token_in_its_config(server: Server) -> None:
    server.good, server.config = {"first", "second"}, {"overrides": {"token": "second"}}
    assert look(server, token="first") == {"format-version": 5}
    assert [headers["authorization"] for _, _, headers in server.requests] == ["Bearer first", "Bearer second"]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((401, {"error": "invalid_client", "error_description": "us:s3cret"}), "HTTP 401 (invalid_client), when"),
        ((400, {"error": "s3cret"}), "HTTP 400, when requesting a token"), ((404, {}), "HTTP 404, when"),
        ((200, {"token": "t0ken"}), "no token in the response"), ((200, "s3cret"), "not JSON, when"),
        ((200, ["s3cret"]), "not a JSON object"),
    ],
)  # fmt: skip
def test_a_failed_token_request_is_an_error_and_never_a_new_table(
    server: Server, answer: tuple[int, Any], reason: str
) -> None:
    server.answer = answer
    assert reason in refused(server, credential=CREDENTIAL)


@pytest.mark.parametrize(
    ("properties", "reason"),
    [
        ({}, "HTTP 401"), ({"token": "s3cret-t0ken"}, "HTTP 401"), ({"token": "s3cret\n"}, "invalid characters"),
        ({"header.X-Key": "s3cret\u20ac", "token": "x"}, "invalid characters"),
        ({"credential": CREDENTIAL, "rest.auth.type": "sigv4"}, "unsupported"),
        ({"token": "x", "rest.auth.type": "none"}, "HTTP 401"),
    ],
)  # fmt: skip
def test_failed_authentication_is_reported_without_a_secret(
    server: Server, properties: dict[str, str], reason: str
) -> None:
    assert reason in refused(server, **properties)


def test_an_address_without_a_catalog_is_an_error_and_never_a_new_table(server: Server) -> None:
    server.good = {"t0ken"}
    assert look(server, "other", token="t0ken") is None
    server.uri += "/elsewhere"
    server.respond = lambda *_: (404, "default backend - 404")  # type: ignore[method-assign] # as a gateway does
    assert "HTTP 404" in refused(server, token="t0ken")


def test_a_broken_connection_or_address_is_reported_without_a_secret(server: Server) -> None:
    for uri in ("http://us:s3cret@127.0.0.1", "http://127.0.0.1:1/s3cret"):
        server.uri = uri
        refused(server, credential=CREDENTIAL)


def test_a_redirect_s_target_gets_no_token_and_no_header(server: Server) -> None:
    with Server().listening() as another:
        server.respond = lambda *_: (302, f"{another.uri}/v1/config")  # type: ignore[method-assign] # it redirects
        refused(server, token="t0ken", **{"header.X-Key": "s3cret"})
        ((_, _, headers),) = another.requests
    assert not {"authorization", "x-key"} & set(headers)


def test_the_text_of_a_catalog_has_no_secret(server: Server) -> None:
    catalog = Catalog(kind="rest", root=Path("/lake"), uri=server.uri, properties={"credential": CREDENTIAL})
    assert "s3cret" not in repr(catalog)
