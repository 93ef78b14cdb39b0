"""Finding an Iceberg table's newest metadata in each kind of catalog, without Java."""

from __future__ import annotations

import gzip
import json
import sqlite3
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tailrace.errors import TableUnusable
from tailrace.tables.iceberg.catalogs import Catalog, local_path, newest_file


def write(folder: Path, number: int, *, ending: str = ".metadata.json", hint: int | None = None) -> Path:
    inside = folder / "metadata"
    inside.mkdir(parents=True, exist_ok=True)
    content = json.dumps({"format-version": number}).encode()
    file = inside / f"v{number}{ending}"
    file.write_bytes(gzip.compress(content) if ".gz" in ending else content)
    if hint is not None:
        (inside / "version-hint.text").write_text(str(hint))
    return file


def folder_catalog(root: Path) -> Catalog:
    return Catalog(kind="hadoop", root=root)


# --- folders -----------------------------------------------------------------------------------------------


def test_a_folder_without_metadata_holds_no_table(tmp_path: Path) -> None:
    assert folder_catalog(tmp_path).metadata(tmp_path / "public" / "t") is None
    (tmp_path / "public" / "t" / "metadata").mkdir(parents=True)
    assert folder_catalog(tmp_path).metadata(tmp_path / "public" / "t") is None


def test_commits_ahead_of_the_hint_are_found(tmp_path: Path) -> None:
    table = tmp_path / "public" / "t"
    for number in (1, 2, 3):
        write(table, number, hint=1)
    assert folder_catalog(tmp_path).metadata(table) == {"format-version": 3}


@pytest.mark.parametrize("hint", ["", "garbage", "99"])
def test_a_useless_hint_is_ignored(tmp_path: Path, hint: str) -> None:
    table = tmp_path / "public" / "t"
    write(table, 9)
    write(table, 10)
    (table / "metadata" / "version-hint.text").write_text(hint)
    assert newest_file(table / "metadata") == table / "metadata" / "v10.metadata.json"


@pytest.mark.parametrize("ending", [".gz.metadata.json", ".metadata.json.gz"])
def test_metadata_may_be_compressed(tmp_path: Path, ending: str) -> None:
    table = tmp_path / "public" / "t"
    write(table, 4, ending=ending, hint=4)
    assert folder_catalog(tmp_path).metadata(table) == {"format-version": 4}


@pytest.mark.parametrize("garbage", ["garbage", "", "{}", "[]", "[1]", "7"])
def test_metadata_that_cannot_be_read_is_an_error_and_never_a_new_table(tmp_path: Path, garbage: str) -> None:
    table = tmp_path / "public" / "t"
    write(table, 1).write_text(garbage)
    with pytest.raises(TableUnusable, match="cannot be read"):
        folder_catalog(tmp_path).metadata(table)


@pytest.mark.parametrize("name", ["t", "public/a%20b", "public/a:b", "public/a[b"])
def test_a_name_that_no_catalog_can_have_is_refused_with_a_hint(tmp_path: Path, name: str) -> None:
    with pytest.raises(TableUnusable, match="cannot have this name") as refused:
        folder_catalog(tmp_path).metadata(tmp_path / name)
    assert "tables.rules" in refused.value.hint


@pytest.mark.parametrize("location", ["/a/b.json", "file:/a/b.json", "file:///a/b.json"])
def test_a_local_file_is_found_by_any_form_of_its_location(location: str) -> None:
    assert local_path(location) == Path("/a/b.json")


# --- databases ---------------------------------------------------------------------------------------------


def database(file: Path, location: str) -> None:
    with sqlite3.connect(file) as lite:
        lite.execute(
            "create table iceberg_tables (catalog_name text, table_namespace text, table_name text,"
            " metadata_location text, previous_metadata_location text, iceberg_type text)"
        )
        lite.execute("insert into iceberg_tables values ('tailrace', 'public', 't', ?, null, 'TABLE')", (location,))
    lite.close()


def test_the_metadata_is_found_through_a_database(tmp_path: Path) -> None:
    file, path = tmp_path / "catalog.db", tmp_path / "lake" / "public"
    catalog = Catalog(kind="jdbc", root=tmp_path / "lake", uri=f"jdbc:sqlite:{file}")
    assert catalog.metadata(path / "t") is None, "there is no database yet"
    database(file, f"file:{write(path / 't', 7)}")
    assert catalog.metadata(path / "t") == {"format-version": 7}
    assert catalog.metadata(path / "other") is None


@pytest.mark.parametrize("written", ["u:s3cr%zzet@127.0.0.1", "127.0.0.1:s3cret/x@127.0.0.1"])
def test_a_password_that_was_not_encoded_is_not_shown_nor_by_what_caused_the_error(
    tmp_path: Path, written: str
) -> None:
    catalog = Catalog(kind="jdbc", root=tmp_path, uri=f"jdbc:postgresql://{written}:1/none")
    with pytest.raises(TableUnusable, match="catalog cannot be read") as caught:
        catalog.metadata(tmp_path / "public" / "t")
    assert "s3c" not in "".join(traceback.format_exception(caught.value, limit=0))


def test_a_database_that_does_not_answer_is_an_error(tmp_path: Path) -> None:
    catalog = Catalog(
        kind="jdbc", root=tmp_path, uri="jdbc:postgresql://127.0.0.1:1/none", properties={"jdbc.password": "secret"}
    )
    with pytest.raises(TableUnusable, match="catalog cannot be read") as refused:
        catalog.metadata(tmp_path / "public" / "t")
    assert "secret" not in f"{refused.value} {catalog!r}"


# --- servers -----------------------------------------------------------------------------------------------


class Server(BaseHTTPRequestHandler):
    """A server of one table, according to the REST catalog specification."""

    seen: ClassVar[list[tuple[str, str | None]]] = []
    status: ClassVar[int] = 200

    def do_GET(self) -> None:
        self.seen.append((self.path, self.headers.get("Authorization")))
        answers: dict[str, Any] = {
            "/v1/config?warehouse=lake": {"defaults": {}, "overrides": {"prefix": "a/b"}},
            "/v1/a%2Fb/namespaces/x%1Fpublic/tables/t": {"metadata-location": "x", "metadata": {"format-version": 5}},
        }
        found = answers.get(self.path)
        status = self.status if self.status != 200 else 200 if found is not None else 404
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(found if status == 200 else {}).encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@contextmanager
def served(status: int = 200) -> Iterator[str]:
    Server.seen, Server.status = [], status
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_a_rest_server_returns_the_metadata(tmp_path: Path) -> None:
    with served() as uri:
        catalog = Catalog(kind="rest", root=tmp_path, uri=uri, warehouse="lake", properties={"token": "k"})
        assert catalog.metadata(tmp_path / "x" / "public" / "t") == {"format-version": 5}
        assert catalog.metadata(tmp_path / "x" / "public" / "other") is None
    assert {authorization for _, authorization in Server.seen} == {"Bearer k"}


def test_a_server_error_or_an_unreachable_server_is_an_error(tmp_path: Path) -> None:
    with served(status=503) as uri:
        catalog = Catalog(kind="rest", root=tmp_path, uri=uri, warehouse="lake")
        with pytest.raises(TableUnusable, match="HTTP 503"):
            catalog.metadata(tmp_path / "x" / "public" / "t")
    with pytest.raises(TableUnusable, match="catalog cannot be read"):
        catalog.metadata(tmp_path / "x" / "public" / "t")
