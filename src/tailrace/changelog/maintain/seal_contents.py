"""Define the contents of a seal: its limits, its record, and its rows of commits.

Everything is derived from the headers of the commits, so sealing the same commits twice gives the same contents. The
record names no files yet, and has neither time nor checksum: the sealer adds them when it publishes.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from tailrace.changelog.format.commit_file import CommitHeader
from tailrace.changelog.format.seal import COMMIT_COLUMNS, Seal
from tailrace.changelog.maintain.seal_writer import SEAL_FILE_SIZES, SealFileSizes


@dataclass(frozen=True, kw_only=True)
class SealLimits:
    """Limits of one seal, and of one file in it."""

    commits: int = 50_000
    """Commits in one seal, so that its memory is bounded."""
    bytes: int = 256 << 20
    """Bytes of commits in one seal, unless a single commit has more."""
    merge_count: int = 8
    """Seals of one level that become one of the next."""
    merge_bytes: int = 1 << 30
    merge_seconds: float = 86_400.0
    """Seals that would hold more bytes, or span longer, are not merged.

    Retention trims whole seals, so they must not grow further.
    """
    small_bytes: int = 64 << 20
    """A smaller file is written again, together with its neighbours, when seals are merged."""
    file_sizes: SealFileSizes = SEAL_FILE_SIZES


SEAL_LIMITS = SealLimits()


def commit_rows(headers: list[CommitHeader]) -> pa.Table:
    columns = {
        "commit": [header.commit for header in headers],
        "end": [header.end.value for header in headers],
        "next_seq": [header.next_seq for header in headers],
        "transactions": [header.transactions for header in headers],
        "rows": [header.rows for header in headers],
        "written_at": [header.written_at for header in headers],
        "committed_at": [header.committed_at for header in headers],
    }
    return pa.table(columns, schema=COMMIT_COLUMNS)


def coalesced_commits(commits: pa.Table) -> pa.Table:
    """Return the commits without those that only moved the position before another that did."""
    empty = commits.column("rows").to_numpy() == 0
    kept = ~empty
    kept[:-1] |= ~empty[1:]
    kept[-1] = True
    return commits.filter(pa.array(kept))


def seal_of_commits(headers: list[CommitHeader]) -> Seal:
    first, last = headers[0], headers[-1]
    times = [header.committed_at for header in headers if header.committed_at is not None]
    return Seal(
        log=first.log,
        first=first.commit,
        last=last.commit,
        start=first.start,
        end=last.end,
        first_seq=first.next_seq - first.rows,
        next_seq=last.next_seq,
        transactions=sum(header.transactions for header in headers),
        rows=sum(header.rows for header in headers),
        shapes=last.shapes,
        timeline=last.timeline,
        written_from=first.written_at,
        written_to=last.written_at,
        committed_at=max(times, default=None),
        sealed_at=0,
        level=0,
        commits_size=0,
        commits_crc=0,
        files=(),
    )
