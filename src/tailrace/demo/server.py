"""Runs a private PostgreSQL server for the demo, the tests and the benchmarks.

What must stay true:

- No server outlives this process. It stops in `stop()`, or when the interpreter ends. If we are killed, the kernel
  sends the postmaster SIGQUIT (Linux). That signal follows the *thread* that called `start()`: call it from one that
  runs as long as the server is needed.
- The server never runs as root: when we are root it runs as `postgres` or `nobody`. That user must be able to reach the
  binaries and the data folder. Binaries that it cannot reach are copied to a cache folder. The data folder is ours,
  under the system's temporary folder, unless the caller names one.
- A folder that we created is removed by `stop()`. A folder that the caller named is never removed.
- `start()` returns only once the server accepts connections, and within a bounded time.
- The port stays the same as long as the object exists, so a URL stays valid after `restart()` and `kill()`.

With `auth="trust"`, the default, any local user can log in. It is a server for play, not for secrets.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, TypeVar
from urllib.parse import quote

import psycopg
from psycopg.rows import TupleRow

from tailrace.demo.server_binaries import ServerFailed, find_binaries, is_reachable

Auth = Literal["trust", "scram-sha-256"]
StopMode = Literal["smart", "fast", "immediate"]
Value = TypeVar("Value")

START_SECONDS_MAX = 60.0
STOP_SECONDS_MAX = 30.0
INITDB_SECONDS_MAX = 120.0
PORT_TRIES_MAX = 5
LOG_TAIL_LINES = 25
SOCKET_PATH_BYTES_MAX = 107  # sockaddr_un.sun_path less its closing zero

# Below Linux's range for outgoing connections (32768 and up), so that while the server is down for a restart
# no client's connection can be given its port.
PORTS = range(20_000, 32_000)

DEFAULT_SETTINGS: Mapping[str, str] = {
    "wal_level": "logical",
    "max_wal_senders": "20",
    "max_replication_slots": "20",
    "max_connections": "60",
    "timezone": "UTC",
    "log_timezone": "UTC",
}

_SIGNALS = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}

# Runs in the child, then becomes the server. Not a `preexec_fn`: that runs Python between fork and exec,
# which may deadlock when we have threads. PR_SET_PDEATHSIG (1) must follow setuid, which clears it; a parent
# that died before the call is noticed by the changed parent id.
_LAUNCHER = """
import ctypes, os, signal, sys
parent, uid, gid, *command = sys.argv[1:]
if os.getuid() != int(uid):
    os.setgroups([int(gid)]); os.setgid(int(gid)); os.setuid(int(uid))
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGQUIT, 0, 0, 0)
if os.getppid() != int(parent):
    sys.exit("the parent process is gone")
os.umask(0o077)
os.execv(command[0], command)
"""


class EmbeddedPostgres:
    """One PostgreSQL server of our own: `with EmbeddedPostgres() as server: server.connect()`."""

    host = "127.0.0.1"

    def __init__(
        self,
        folder: Path | None = None,
        *,
        version: int = 16,
        settings: Mapping[str, str] | None = None,
        listen: bool = True,
        auth: Auth = "trust",
        password: str | None = None,
    ) -> None:
        if (auth == "trust") != (password is None):
            raise ValueError("a password belongs to auth='scram-sha-256', and only to that")
        self.version = version
        self.settings = {**DEFAULT_SETTINGS, **(settings or {})}
        """The content of postgresql.conf; a change takes effect at the next start."""
        self._given_folder = folder.absolute() if folder is not None else None
        self._made_folders: list[Path] = []
        self._folder: Path | None = None
        self._socket_folder: Path | None = None
        self._listen = listen
        self._auth = auth
        self._password = password
        self._user = _server_user()
        self._bin: Path | None = None
        self._port: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._owner_pid = os.getpid()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # --- paths ----------------------------------------------------------------------------------------------

    @property
    def bin(self) -> Path:
        """The folder of psql, pgbench, pg_recvlogical and the rest, of this server's version."""
        if self._bin is None:
            self._bin = find_binaries(self.version, self._user)
        return self._bin

    @property
    def port(self) -> int:
        return _known(self._port)

    @property
    def folder(self) -> Path:
        """Holds `data/`, the server's log and, where its path is short enough, the socket."""
        return _known(self._folder)

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def socket_folder(self) -> Path:
        return _known(self._socket_folder)

    @property
    def log_file(self) -> Path:
        return self.folder / "server.log"

    @property
    def pid(self) -> int | None:
        """The postmaster's process id while it runs."""
        return self._process.pid if self.running and self._process is not None else None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def url(self, database: str = "postgres", user: str = "postgres", *, unix: bool = False) -> str:
        """Return a connection URL. Over the Unix socket if requested, or if the server has no TCP port."""
        secret = f":{quote(self._password, safe='')}" if self._password is not None else ""
        who, where = quote(user, safe="") + secret, quote(database, safe="")
        if unix or not self._listen:
            host = quote(str(self.socket_folder), safe="")
            return f"postgresql://{who}@/{where}?host={host}&port={self.port}"
        return f"postgresql://{who}@{self.host}:{self.port}/{where}"

    def connect(
        self, database: str = "postgres", user: str = "postgres", *, autocommit: bool = True
    ) -> psycopg.Connection[TupleRow]:
        return psycopg.connect(self.url(database, user), autocommit=autocommit, connect_timeout=10)

    # --- start and stop -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the server, creating its data folder the first time; do nothing if it runs."""
        if self.running:
            return
        try:
            self._prepare()
            self._launch()
        except BaseException:
            self.stop("immediate")
            raise

    def stop(self, mode: StopMode = "fast") -> None:
        """Stop the server and remove every folder we created. Safe to call twice, and when nothing runs."""
        if os.getpid() != self._owner_pid:
            return  # a fork of us that runs our exit handlers must not stop its parent's server
        atexit.unregister(self.stop)
        try:
            self.halt(mode)
            if self._made_folders and self._folder is not None:
                _free_shared_memory(self.data)
        finally:
            for made in self._made_folders:
                shutil.rmtree(made, ignore_errors=True)
            self._made_folders.clear()
            self._folder = self._socket_folder = None

    def halt(self, mode: StopMode = "fast") -> None:
        """Stop the server and keep its data; `start()` restarts it on the same port."""
        process = self._process
        if process is None:
            return
        # A fast stop waits for replication clients to take what is left; one that hangs must not hold us.
        for step in (mode, "immediate"):
            if process.poll() is None:
                process.send_signal(_SIGNALS[step])
            try:
                process.wait(STOP_SECONDS_MAX)
                break
            except subprocess.TimeoutExpired:
                continue
        else:
            self.kill()
        self._process = None

    def restart(self, mode: StopMode = "fast") -> None:
        """Stop and start again, with the same data and port, and the current `settings`."""
        self.halt(mode)
        self.start()

    def kill(self) -> None:
        """Crash: SIGKILL to the server and all its sessions. `start()` then recovers from the WAL."""
        process = self._process
        if process is None:
            return
        # While stopped by SIGSTOP, the postmaster can neither restart its children nor ask them to end. Each leads a
        # process group of its own, so no one signal reaches them all.
        process.send_signal(signal.SIGSTOP)
        sessions = _children(process.pid)
        for pid in sessions:
            _kill_quietly(pid)
        process.kill()
        process.wait(STOP_SECONDS_MAX)
        _wait_until_gone(sessions)
        self._process = None

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """Return the end of the server's own log."""
        try:
            text = self.log_file.read_text(errors="replace")
        except OSError:
            return "(no server log)"
        return "\n".join(text.splitlines()[-lines:]) or "(the server log is empty)"

    # --- preparation ----------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        if self._folder is None:
            self._folder = self._given_folder or self._make_folder()
            self._folder.mkdir(parents=True, exist_ok=True)
            self._own(self._folder)
            _require_reachable(self._folder, self._user)
            self._socket_folder = self._choose_socket_folder(self._folder)
            atexit.register(self.stop)
        if not (self.data / "PG_VERSION").exists():
            self._initdb()

    def _make_folder(self) -> Path:
        made = Path(tempfile.mkdtemp(prefix="tailrace-pg-"))
        self._made_folders.append(made)
        return made

    def _choose_socket_folder(self, folder: Path) -> Path:
        fits = len(os.fsencode(folder / "socket" / ".s.PGSQL.00000")) <= SOCKET_PATH_BYTES_MAX
        chosen = (folder if fits else self._make_folder()) / "socket"
        chosen.mkdir(exist_ok=True)
        self._own(chosen.parent)
        self._own(chosen)
        return chosen

    def _initdb(self) -> None:
        options = ["-U", "postgres", "-E", "UTF8", "--locale=C", "--no-sync", f"--auth={self._auth}"]
        secret = self.folder / "password"
        if self._password is not None:
            secret.touch(mode=0o600)
            self._own(secret)
            secret.write_text(self._password + "\n")
            options.append(f"--pwfile={secret}")
        try:
            with self.log_file.open("ab") as log:
                made = self._run("initdb", "-D", str(self.data), *options, log=log.fileno())
            try:
                code = made.wait(INITDB_SECONDS_MAX)
            except BaseException:
                made.kill()
                made.wait()
                raise
        except subprocess.TimeoutExpired:
            raise ServerFailed(f"initdb did not end within {INITDB_SECONDS_MAX:.0f} s") from None
        finally:
            secret.unlink(missing_ok=True)
        if code != 0:
            raise ServerFailed(f"initdb failed with exit code {code}:\n{self.log_tail()}")

    def _launch(self) -> None:
        port_is_settled = self._port is not None
        for attempt in range(PORT_TRIES_MAX):
            self._port = self._port or _free_port()
            self._write_settings()
            with self.log_file.open("ab") as log:
                began = log.tell()
                self._process = self._run("postgres", "-D", str(self.data), log=log.fileno())
            if self._wait_until_ready():
                return
            tail = self.log_tail()
            lost_port = b"Address already in use" in self.log_file.read_bytes()[began:]
            if not lost_port or port_is_settled or attempt + 1 == PORT_TRIES_MAX:
                raise ServerFailed(f"PostgreSQL {self.version} did not start; its log ends:\n{tail}")
            self._port = None

    def _write_settings(self) -> None:
        settings = {
            **self.settings,
            "port": str(self.port),
            "listen_addresses": self.host if self._listen else "",
            "unix_socket_directories": str(self.socket_folder),
        }
        lines = [f"{name} = '{_conf_text(value)}'\n" for name, value in settings.items()]
        conf = self.data / "tailrace.conf"
        conf.write_text("".join(lines))
        self._own(conf)
        main, include = self.data / "postgresql.conf", "\ninclude 'tailrace.conf'\n"
        if include not in main.read_text():
            with main.open("a") as file:
                file.write(include)

    def _wait_until_ready(self) -> bool:
        """Return whether it accepts connections; False if it ended. Reads the status written for pg_ctl."""
        process, status = self._process, self.data / "postmaster.pid"
        assert process is not None
        deadline = time.monotonic() + START_SECONDS_MAX
        while time.monotonic() < deadline:
            if process.poll() is not None:
                return False
            lines = status.read_text().splitlines() if status.exists() else []
            # A crash leaves the old file behind, so the process id is compared too.
            status_is_ours = len(lines) >= 8 and lines[0] == str(process.pid)
            if status_is_ours and lines[7].strip() in ("ready", "standby"):
                return True
            time.sleep(0.02)
        raise ServerFailed(
            f"PostgreSQL {self.version} did not accept connections within {START_SECONDS_MAX:.0f} s; "
            f"its log ends:\n{self.log_tail()}"
        )

    def _run(self, program: str, *arguments: str, log: int) -> subprocess.Popen[bytes]:
        """Start one of the server's programs as the server's user, in its own session.

        A session of its own keeps the terminal's Ctrl-C from it: we decide when it stops.
        """
        launch = [sys.executable, "-I", "-S", "-c", _LAUNCHER]
        who = [str(os.getpid()), str(self._user.pw_uid), str(self._user.pw_gid)]
        return subprocess.Popen(
            [*launch, *who, str(self.bin / program), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=self.folder,
            env=_server_environment(),
            start_new_session=True,
        )

    def _own(self, path: Path) -> None:
        if os.getuid() == 0:
            os.chown(path, self._user.pw_uid, self._user.pw_gid)


# --- users and rights --------------------------------------------------------------------------------------


def _server_user() -> pwd.struct_passwd:
    if os.getuid() != 0:
        return pwd.getpwuid(os.getuid())
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise ServerFailed("PostgreSQL refuses to run as root, and there is no user `postgres` or `nobody`")


def _require_reachable(folder: Path, user: pwd.struct_passwd) -> None:
    if os.getuid() == 0 and not is_reachable(folder, user):
        raise ServerFailed(
            f"user {user.pw_name}, as whom the server runs, cannot reach {folder}: "
            "give no folder, or one whose parents all may be entered"
        )


def _server_environment() -> dict[str, str]:
    """Return our environment without what would change the server's behaviour."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PG", "LC_", "LD_")) and name not in ("LANG", "LANGUAGE", "TZ")
    }


# --- processes, ports and memory ---------------------------------------------------------------------------


def _known(value: Value | None) -> Value:
    if value is None:
        raise ServerFailed("the server was not started yet")
    return value


def _conf_text(value: str) -> str:
    return value.replace("\\", "\\\\").replace("'", "''")


def _free_port() -> int:
    for _ in range(100):
        port = random.SystemRandom().choice(PORTS)
        with socket.socket() as probe:
            try:
                probe.bind((EmbeddedPostgres.host, port))
            except OSError:
                continue
            return port
    raise ServerFailed(f"no free port between {PORTS.start} and {PORTS.stop}")


def _children(parent: int) -> list[int]:
    """Return the process ids of the server's sessions.

    Without /proc there are none: sessions end once they notice that the server is gone.
    """
    listed = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]
    return [pid for pid in listed if _state_and_parent(pid)[1] == parent]


def _state_and_parent(pid: int) -> tuple[str, int]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ("gone", 0)
    state, parent = text.rpartition(")")[2].split()[:2]  # the name before it may contain anything
    return (state, int(parent))


def _kill_quietly(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + STOP_SECONDS_MAX
    # A zombie holds nothing any more; in a container there may be no process to collect it.
    while any(_state_and_parent(pid)[0] not in ("gone", "Z", "X") for pid in pids):
        if time.monotonic() > deadline:
            raise ServerFailed("sessions of the killed server do not end")
        time.sleep(0.01)


def _free_shared_memory(data: Path) -> None:
    """Free the small System V segment that a crashed server leaves. A clean stop leaves none."""
    status = data / "postmaster.pid"
    lines = status.read_text().splitlines() if status.exists() else []
    numbers = lines[6].split() if len(lines) > 6 else []
    if sys.platform == "linux" and len(numbers) == 2:
        ctypes.CDLL(None).shmctl(int(numbers[1]), 0, None)  # 0 is IPC_RMID
