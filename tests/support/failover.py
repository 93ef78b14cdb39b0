"""Servers that take over from one another: copies of a server's folder, as standbys or as restored backups."""

from __future__ import annotations

import enum
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tailrace.demo.server import EmbeddedPostgres
from tests.support.pipelines import eventually


class Copy(enum.Enum):
    """What a copy of a server is started as."""

    FOLLOWING = "a standby that is sent what the server writes from here on"
    LEFT_BEHIND = "a standby that hears nothing more"
    RESTORED = "a server of its own, as after restoring a backup of the disk"


@contextmanager
def copy_of(server: EmbeddedPostgres, kind: Copy) -> Iterator[EmbeddedPostgres]:
    """A copy of the server as it is now, slots included; the server is halted for it and started again."""
    folder = Path(tempfile.mkdtemp(prefix="tailrace-copy-"))
    folder.chmod(0o755)
    try:
        server.halt()
        subprocess.run(["cp", "-a", str(server.data), str(folder / "data")], check=True)
        server.start()
        settings = dict(server.settings)
        if kind is not Copy.RESTORED:
            mark = folder / "data" / "standby.signal"
            mark.touch()
            owner = (server.data / "PG_VERSION").stat()
            shutil.chown(mark, owner.st_uid, owner.st_gid)
        if kind is Copy.FOLLOWING:
            settings["primary_conninfo"] = f"host={server.host} port={server.port} user=postgres"
        with EmbeddedPostgres(folder, version=server.version, settings=settings) as copy:
            yield copy
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def promote(standby: EmbeddedPostgres) -> None:
    with standby.connect() as connection:
        connection.execute("SELECT pg_promote(true, 240)")
        row = connection.execute("SELECT pg_is_in_recovery()").fetchone()
    assert row == (False,)


def wait_for_replay(server: EmbeddedPostgres, standby: EmbeddedPostgres) -> None:
    """Until the standby has everything the server has flushed."""
    with server.connect() as connection:
        (end,) = connection.execute("SELECT pg_current_wal_flush_lsn()::text").fetchone() or ("",)
    with standby.connect() as connection:
        query = "SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn"
        assert eventually(lambda: connection.execute(query, (end,)).fetchone() == (True,))


def either(server: EmbeddedPostgres, standby: EmbeddedPostgres) -> str:
    """The URL that finds whichever of the two takes writes, as one writes it for a failover."""
    hosts = f"{server.host}:{server.port},{standby.host}:{standby.port}"
    return f"postgresql://postgres@{hosts}/postgres?target_session_attrs=read-write"
