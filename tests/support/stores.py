"""An S3 server of our own (moto's), and a way to it on which answers can be lost."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from tailrace.storage.objects import ObjectPath

BUCKET = "tailrace-test"
ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
START_SECONDS_MAX = 240.0


# It chooses its port itself: one that was free a moment ago may be another's by now.
_SERVER = """
import logging, threading
logging.getLogger("werkzeug").setLevel(logging.ERROR)
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
threading.Event().wait()
"""


@dataclass(frozen=True)
class S3:
    """A server that listens, with one bucket."""

    endpoint: str

    def place(self) -> ObjectPath:
        """A place of its own for a log."""
        return ObjectPath.parse(f"s3://{BUCKET}/{uuid.uuid4().hex[:12]}/log", endpoint=self.endpoint)


@contextmanager
def s3_server() -> Iterator[S3]:
    """moto's server as a process of its own; everything is gone when it ends."""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            port = process.stdout.readline().decode().strip()
            assert port, f"moto's server ended: {process.wait()}"
            _make_bucket(f"http://127.0.0.1:{port}")
            yield S3(f"http://127.0.0.1:{port}")
        finally:
            process.kill()
            process.wait()


def _make_bucket(endpoint: str) -> None:
    import urllib.request

    asked = urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT")
    with urllib.request.urlopen(asked, timeout=START_SECONDS_MAX) as answer:
        assert answer.status == 200


@dataclass
class LossyWay:
    """A proxy in front of a server: it hands requests on, and may keep answers to itself.

    `lose` is asked with the first line of every request: whether the request is done and its answer lost. `refuse`
    is asked the same: whether the request is not even handed on.
    """

    server: S3
    lost: list[str] = field(default_factory=list)
    lose: Any = field(default=lambda line: False)
    refuse: Any = field(default=lambda line: False)

    @contextmanager
    def open(self) -> Iterator[S3]:
        ended = threading.Event()
        with socket.create_server(("127.0.0.1", 0)) as listening:
            listening.settimeout(0.1)
            thread = threading.Thread(target=self._serve, args=(listening, ended), daemon=True)
            thread.start()
            try:
                yield S3(f"http://127.0.0.1:{listening.getsockname()[1]}")
            finally:
                ended.set()
                thread.join()

    def _serve(self, listening: socket.socket, ended: threading.Event) -> None:
        while not ended.is_set():
            with suppress(TimeoutError):
                client, _ = listening.accept()
                threading.Thread(target=self._one, args=(client,), daemon=True).start()

    def _one(self, client: socket.socket) -> None:
        """One connection; one request after another, each on a connection of its own to the server."""
        with client, suppress(OSError):
            client.settimeout(START_SECONDS_MAX)
            while request := _message(client):
                line = request.partition(b"\r\n")[0].decode()
                if self.refuse(line):
                    return
                with socket.create_connection(_address(self.server.endpoint), START_SECONDS_MAX) as server:
                    server.sendall(request)
                    answer = _message(server, head=line.startswith("HEAD "))
                if self.lose(line):
                    self.lost.append(line)
                    return
                client.sendall(answer)


def _address(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.removeprefix("http://").partition(":")
    return host, int(port)


def _message(connection: socket.socket, *, head: bool = False) -> bytes:
    """A whole request or answer as it came; nothing if the other side has closed."""
    found = b""
    while b"\r\n\r\n" not in found:
        chunk = connection.recv(65536)
        if not chunk:
            return b""
        found += chunk
    headers, _, body = found.partition(b"\r\n\r\n")
    lengths = [line for line in headers.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    size = 0 if head or not lengths else int(lengths[0].split(b":")[1])
    while len(body) < size:
        chunk = connection.recv(65536)
        if not chunk:
            break
        body += chunk
    return headers + b"\r\n\r\n" + body
