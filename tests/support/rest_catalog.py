"""A catalog that speaks REST: Iceberg's own handlers of requests, in the tests' Java process, behind Python's server.

What a commit requires, and whether it is refused, is decided by Iceberg's code; here requests are only passed on. The
tables are listed in a database of SQLite.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

_STATUS = {"NoSuchTableException": 404, "NoSuchNamespaceException": 404, "AlreadyExistsException": 409,
           "CommitFailedException": 409}  # fmt: skip
_NOTHING = "{}"


@contextmanager
def rest_catalog(spark: SparkSession, folder: Path) -> Iterator[str]:
    """The address of a catalog whose list lies in the folder."""
    handlers = _Handlers(spark, folder)

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer("GET")

        def do_HEAD(self) -> None:
            self._answer("HEAD")

        def do_POST(self) -> None:
            self._answer("POST")

        def _answer(self, method: str) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
            status, said = handlers.answer(method, self.path, body)
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
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class _Handlers:
    def __init__(self, spark: SparkSession, folder: Path) -> None:
        jvm: Any = spark._jvm
        self._iceberg = jvm.org.apache.iceberg
        self._loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
        self._catalog = self._iceberg.jdbc.JdbcCatalog()
        self._catalog.setConf(spark._jsc.hadoopConfiguration())
        listed = {"uri": f"jdbc:sqlite:{folder / 'rest.db'}", "warehouse": str(folder), "jdbc.schema-version": "V1"}
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
