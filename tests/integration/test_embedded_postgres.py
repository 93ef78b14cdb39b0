"""The embedded server: it starts as whoever we are, answers, and never outlives us."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tailrace.demo import server as server_module
from tailrace.demo import server_binaries
from tailrace.demo.server import EmbeddedPostgres
from tailrace.demo.server_binaries import ServerFailed

FAST = {"fsync": "off"}
SECONDS_MAX = 240.0
as_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root: it is about running as another user")


def value(server: EmbeddedPostgres, query: str) -> object:
    with server.connect() as connection:
        row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return row[0]


def has_ended(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return text.rpartition(")")[2].split()[0] == "Z"  # dead, but nobody in the container collects it


@pytest.fixture(scope="module")
def shared() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres() as running:
        yield running


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that any user may enter; pytest's own may not be."""
    made = Path(tempfile.mkdtemp(prefix="tailrace-test-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def test_it_is_ready_for_logical_replication_and_keeps_its_promises_to_disk(shared: EmbeddedPostgres) -> None:
    wanted = {
        "wal_level": "logical",
        "max_wal_senders": "20",
        "max_replication_slots": "20",
        "max_connections": "60",
        "fsync": "on",
        "autovacuum": "on",
        "TimeZone": "UTC",
        "server_encoding": "UTF8",
    }
    assert {name: value(shared, f"SHOW {name}") for name in wanted} == wanted


@pytest.mark.parametrize("unix", [False, True])
def test_its_url_works_over_tcp_and_over_the_unix_socket(shared: EmbeddedPostgres, unix: bool) -> None:
    with psycopg.connect(shared.url(unix=unix)) as connection:
        row = connection.execute("SELECT inet_client_addr() IS NULL").fetchone()
    assert row == (unix,)


def test_the_clients_of_the_same_version_work(shared: EmbeddedPostgres) -> None:
    asked = [str(shared.bin / "psql"), "-Atc", "SELECT 41 + 1", shared.url()]
    assert subprocess.run(asked, capture_output=True, text=True, check=True, timeout=SECONDS_MAX).stdout == "42\n"
    for name in ("pg_recvlogical", "pgbench"):
        subprocess.run([shared.bin / name, "--version"], capture_output=True, check=True, timeout=SECONDS_MAX)


def test_ctrl_c_in_our_terminal_does_not_reach_it(shared: EmbeddedPostgres) -> None:
    assert shared.pid is not None
    assert os.getsid(shared.pid) != os.getsid(0)


@as_root
def test_it_does_not_run_as_root(shared: EmbeddedPostgres) -> None:
    assert Path(f"/proc/{shared.pid}").stat().st_uid != 0


def test_starting_a_running_server_changes_nothing(shared: EmbeddedPostgres) -> None:
    before = shared.pid
    shared.start()
    assert shared.pid == before


@pytest.mark.parametrize("version", [15, 18])
def test_other_versions_start_too(version: int) -> None:
    if version == 15 and not Path("/usr/lib/postgresql/15/bin/postgres").exists():
        pytest.skip("PostgreSQL 15 is not installed on this machine")
    with EmbeddedPostgres(version=version, settings=FAST) as server:
        assert str(value(server, "SHOW server_version")).startswith(str(version))


def test_a_version_that_is_nowhere_is_a_clear_error() -> None:
    with pytest.raises(ServerFailed, match="no binaries of PostgreSQL 9"):
        EmbeddedPostgres(version=9).start()


def test_stop_leaves_no_process_no_folder_and_a_free_port() -> None:
    server = EmbeddedPostgres(settings=FAST)
    server.start()
    pid, folder, port = server.pid, server.folder, server.port
    server.stop()
    assert pid is not None
    assert has_ended(pid)
    assert not folder.exists()
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((server.host, port))
    server.stop()  # and again, which changes nothing


def test_committed_rows_survive_restart_crash_and_halt_on_the_same_url() -> None:
    with EmbeddedPostgres() as server:
        url = server.url()
        with server.connect() as connection:
            connection.execute("CREATE TABLE kept AS SELECT 1 AS n")
        server.settings["work_mem"] = "5MB"
        server.restart()
        assert value(server, "SHOW work_mem") == "5MB"
        with server.connect() as connection:
            connection.execute("INSERT INTO kept VALUES (2)")
            server.kill()
            assert not server.running
            with pytest.raises(psycopg.OperationalError):
                connection.execute("SELECT 1")
        server.start()
        server.halt("immediate")
        server.start()
        assert server.url() == url
        assert value(server, "SELECT array_agg(n ORDER BY n) FROM kept") == [1, 2]


def test_a_killed_server_leaves_nothing_behind_either() -> None:
    with EmbeddedPostgres(settings=FAST) as server:
        folder = server.folder
        segment = (server.data / "postmaster.pid").read_text().splitlines()[6].split()[1]
        server.kill()
    assert not folder.exists()
    in_use = [line.split()[1] for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]]
    assert segment not in in_use


PARENT = """
import sys, time
from tailrace.demo.server import EmbeddedPostgres
server = EmbeddedPostgres(settings={"fsync": "off"})
server.start()
print(server.pid, server.folder, flush=True)
if sys.argv[1] == "wait":
    time.sleep(600)
"""


def start_parent(then: str) -> tuple[subprocess.Popen[str], int, Path]:
    source = str(Path(server_module.__file__).parents[2])
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, then],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": source},
    )
    assert parent.stdout is not None
    pid, folder = parent.stdout.readline().split()
    return parent, int(pid), Path(folder)


def wait_until_ended(pid: int) -> bool:
    deadline = time.monotonic() + SECONDS_MAX
    while not has_ended(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return has_ended(pid)


def test_it_ends_when_we_are_killed() -> None:
    parent, pid, folder = start_parent("wait")
    try:
        assert not has_ended(pid)
        parent.send_signal(signal.SIGKILL)
        parent.communicate(timeout=SECONDS_MAX)
        assert wait_until_ended(pid)
    finally:
        parent.kill()
        shutil.rmtree(folder, ignore_errors=True)


def test_it_ends_and_its_folder_goes_when_a_program_forgets_to_stop_it() -> None:
    parent, pid, folder = start_parent("end")
    parent.communicate(timeout=SECONDS_MAX)
    assert parent.returncode == 0
    assert wait_until_ended(pid)
    assert not folder.exists()


def test_a_given_folder_is_kept_and_used_again(open_folder: Path) -> None:
    given = open_folder / ("long" * 30)  # too long for a socket's address, which then lies elsewhere
    with EmbeddedPostgres(given, settings=FAST) as server, server.connect() as connection:
        connection.execute("CREATE TABLE kept AS SELECT 7 AS n")
        elsewhere = server.socket_folder
    assert not elsewhere.is_relative_to(open_folder)
    assert not elsewhere.exists()
    with EmbeddedPostgres(given, settings=FAST, listen=False) as server:
        assert value(server, "SHOW listen_addresses") == ""
        assert value(server, "SELECT n FROM kept") == 7
    assert (given / "data" / "PG_VERSION").exists()


@as_root
def test_a_folder_the_servers_user_cannot_reach_is_a_clear_error(open_folder: Path) -> None:
    closed = open_folder / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(ServerFailed, match="cannot reach"):
        EmbeddedPostgres(closed / "db").start()


def test_a_password_is_asked_for_and_a_wrong_one_refused() -> None:
    with EmbeddedPostgres(settings=FAST, auth="scram-sha-256", password="p@ss/w:rd%") as server:
        assert value(server, "SELECT 1") == 1
        wrong = re.sub(r"://postgres:[^@]*@", "://postgres:wrong@", server.url())
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            psycopg.connect(wrong)


def test_a_password_without_a_use_is_refused() -> None:
    with pytest.raises(ValueError, match="password"):
        EmbeddedPostgres(password="x")
    with pytest.raises(ValueError, match="password"):
        EmbeddedPostgres(auth="scram-sha-256")


def test_a_server_that_cannot_start_shows_the_end_of_its_log() -> None:
    server = EmbeddedPostgres(settings={"work_mem": "nonsense"})
    with pytest.raises(ServerFailed, match="work_mem") as failure:
        server.start()
    assert "did not start" in str(failure.value)
    with pytest.raises(ServerFailed, match="not started"):
        _ = server.folder


@as_root
def test_programs_that_the_servers_user_cannot_read_are_copied_once(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = Path(EmbeddedPostgres().bin).parents[1]
    closed, cache = open_folder / "closed", open_folder / "cache"
    closed.mkdir(mode=0o700)
    cache.mkdir()
    shutil.copytree(
        installed, closed / installed.name, ignore=shutil.ignore_patterns("pginstall18", "*.a"), symlinks=True
    )
    shutil.copytree(installed.parent / f"{installed.name}.libs", closed / f"{installed.name}.libs")
    monkeypatch.syspath_prepend(closed)
    monkeypatch.setattr(server_binaries, "_CACHE_PARENT", cache)
    with EmbeddedPostgres(settings=FAST) as server:
        assert server.bin.is_relative_to(cache)
        test_the_clients_of_the_same_version_work(server)
        value(server, "SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
    (copy,) = cache.iterdir()
    made_at = copy.stat().st_mtime_ns
    assert EmbeddedPostgres().bin.is_relative_to(copy)
    assert copy.stat().st_mtime_ns == made_at
    copy.chmod(stat.S_IMODE(copy.stat().st_mode) | stat.S_IWOTH)
    with pytest.raises(ServerFailed, match="is not ours"):
        _ = EmbeddedPostgres().bin
