"""A catalog that speaks REST: Iceberg's own handlers of requests, in the tests' Java process, behind Python's server.

What a commit requires, and whether it is refused, is decided by Iceberg's code; here requests are only passed on. The
tables are listed in a database of SQLite. With a credential the server takes nothing without a token, and gives one to
whoever has that.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

_STATUS = {
    "NoSuchTableException": 404,
    "NoSuchNamespaceException": 404,
    "AlreadyExistsException": 409,
    "CommitFailedException": 409,
}
_NOTHING = "{}"


@contextmanager
def rest_catalog(spark: SparkSession, file: Path, credential: str = "") -> Iterator[str]:
    """The address of a catalog whose list is this file."""
    handlers, guard = _Handlers(spark, file), _Guard(credential)

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer("GET")

        def do_HEAD(self) -> None:
            self._answer("HEAD")

        def do_POST(self) -> None:
            self._answer("POST")

        def do_DELETE(self) -> None:
            self._answer("DELETE")

        def _answer(self, method: str) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
            refusal = guard.answer(method, self.path, self.headers.get("Authorization"), body)
            status, said = refusal or handlers.answer(method, self.path, body)
            content = said.encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if method != "HEAD":
                self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class _Guard:
    """Who may ask, by OAuth's client credentials; with no credential everybody."""

    def __init__(self, credential: str) -> None:
        self._credential, self._token = credential, secrets.token_hex(8)

    def answer(self, method: str, path: str, authorization: str | None, body: str) -> tuple[int, str] | None:
        if not self._credential:
            return None
        if (method, path) == ("POST", "/v1/oauth/tokens"):
            form = dict(parse_qsl(body))
            if (form.get("grant_type"), form.get("scope")) != ("client_credentials", "catalog"):
                return 400, json.dumps({"error": "invalid_request"})
            if f"{form.get('client_id')}:{form.get('client_secret')}" != self._credential:
                return 401, json.dumps({"error": "invalid_client"})
            return 200, json.dumps({"access_token": self._token, "token_type": "bearer", "expires_in": 3600})
        if authorization == f"Bearer {self._token}":
            return None
        told = {"message": "no token", "type": "NotAuthorizedException", "code": 401}
        return 401, json.dumps({"error": told})


class _Handlers:
    def __init__(self, spark: SparkSession, file: Path) -> None:
        jvm: Any = spark._jvm
        self._iceberg = jvm.org.apache.iceberg
        self._loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
        self._catalog = self._iceberg.jdbc.JdbcCatalog()
        self._catalog.setConf(spark._jsc.hadoopConfiguration())
        listed = {"uri": f"jdbc:sqlite:{file}", "warehouse": str(file.parent), "jdbc.schema-version": "V1"}
        self._catalog.initialize("rest", listed)
        mapper = self._loader.loadClass("org.apache.iceberg.rest.RESTObjectMapper").getDeclaredMethod("mapper", None)
        mapper.setAccessible(True)
        self._mapper = mapper.invoke(None, None)

    def answer(self, method: str, path: str, body: str) -> tuple[int, str]:
        try:
            return 200, self._said(method, [unquote(part) for part in urlsplit(path).path.split("/")[1:]], body)
        except Py4JJavaError as error:
            kind = error.java_exception.getClass().getSimpleName()
            status = _STATUS.get(kind, 500)
            told = {"message": str(error.java_exception.getMessage()), "type": kind, "code": status}
            return status, json.dumps({"error": told})

    def _said(self, method: str, parts: list[str], body: str) -> str:
        handlers: Any = self._iceberg.rest.CatalogHandlers
        match (method, parts[1:]):
            case ("GET", ["config"]):
                return json.dumps({"defaults": {}, "overrides": {}})
            case ("POST", ["namespaces"]):
                request = self._read(body, "CreateNamespaceRequest")
                return self._written(handlers.createNamespace(self._catalog, request))
            case (_, ["namespaces", name]):
                return self._written(handlers.loadNamespace(self._catalog, self._namespace(name)))
            case ("POST", ["namespaces", name, "tables"]):
                request = self._read(body, "CreateTableRequest")
                create = handlers.stageTableCreate if request.stageCreate() else handlers.createTable
                return self._written(create(self._catalog, self._namespace(name), request))
            case ("POST", ["namespaces", name, "register"]):
                request = self._read(body, "RegisterTableRequest")
                return self._written(handlers.registerTable(self._catalog, self._namespace(name), request))
            case ("DELETE", ["namespaces", name, "tables", table]):
                handlers.dropTable(self._catalog, self._identifier(name, table))
                return _NOTHING
            case ("POST", ["namespaces", name, "tables", table]):
                request = self._read(body, "UpdateTableRequest")
                return self._written(handlers.updateTable(self._catalog, self._identifier(name, table), request))
            case ("GET" | "HEAD", ["namespaces", name, "tables", table]):
                mode = getattr(self._iceberg.rest, "RESTCatalogProperties$SnapshotMode").ALL
                return self._written(handlers.loadTable(self._catalog, self._identifier(name, table), mode))
            case _:
                return _NOTHING  # what a client reports of itself

    def _namespace(self, name: str) -> Any:
        return self._identifier(name, "x").namespace()

    def _identifier(self, name: str, table: str) -> Any:
        return self._iceberg.catalog.TableIdentifier.parse(f"{name.replace(chr(31), '.')}.{table}")

    def _read(self, body: str, request: str) -> Any:
        kind = self._loader.loadClass(f"org.apache.iceberg.rest.requests.{request}")
        return self._mapper.readValue(body, kind)

    def _written(self, response: Any) -> str:
        return str(self._mapper.writeValueAsString(response))
