"""A source in memory that counts in positions of any kind: what `MemoryCapture` gives, with its positions as others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic

import pyarrow as pa

from tailrace.capture.memory.source import MemoryCapture
from tailrace.capture.port import Scan, ScanPiece, SourceId, Stream
from tailrace.model import change
from tailrace.model.batch import ChangeBatch, Window
from tailrace.model.position import ZERO, Lsn
from tailrace.model.position_kinds import (
    BinlogPosition,
    CustomPosition,
    MariadbGtidSet,
    MysqlGtidSet,
    P,
    Position,
    SqlServerLsn,
)
from tailrace.model.schema import TableId

SERVER = ("3e11fa47-71ca-11e1-9e33-c80aa9429562", "")
FILE_BYTES = 100
"""So small that a few transactions fill a file of a binary log."""


@dataclass(frozen=True)
class Kind(Generic[P]):
    """A way to count, there and back."""

    source: str
    count: Callable[[Lsn], P]
    back: Callable[[P], Lsn]


KINDS: dict[str, Kind[Any]] = {
    "postgresql-lsn": Kind[Lsn]("postgres", lambda lsn: lsn, lambda lsn: lsn),
    "custom": Kind[CustomPosition]("api", lambda lsn: CustomPosition(str(lsn.value)), lambda at: Lsn(int(at.text))),
    "custom, opaque": Kind[CustomPosition](
        "api", lambda lsn: CustomPosition(f"page {lsn.value:x}"), lambda at: Lsn(int(at.text[5:], 16))
    ),
    "mysql-binlog": Kind[BinlogPosition](
        "mysql",
        lambda lsn: BinlogPosition(f"mysql-bin.{lsn.value // FILE_BYTES + 1:06}", lsn.value % FILE_BYTES + 4),
        lambda at: Lsn((int(at.file[-6:]) - 1) * FILE_BYTES + at.offset - 4),
    ),
    "mysql-gtid": Kind[MysqlGtidSet](
        "mysql",
        lambda lsn: MysqlGtidSet({SERVER: ((1, lsn.value + 1),)}),
        lambda at: Lsn(at.executed[SERVER][0][1] - 1),
    ),
    "mariadb-gtid": Kind[MariadbGtidSet](
        "mariadb", lambda lsn: MariadbGtidSet({0: (1, lsn.value + 1)}), lambda at: Lsn(at.last[0][1] - 1)
    ),
    "sqlserver-lsn": Kind[SqlServerLsn](
        "sqlserver", lambda lsn: SqlServerLsn(1, lsn.value, 1), lambda at: Lsn(at.block)
    ),
}  # fmt: skip


class Counted(Generic[P]):
    """The source, seen so."""

    def __init__(self, source: MemoryCapture, kind: Kind[P]) -> None:
        self._source, self._kind = source, kind
        self.beginning: Position = kind.count(ZERO)

    def identify(self) -> SourceId:
        return replace(self._source.identity, kind=self._kind.source)

    def prepare(self, position: P | None, origin: SourceId | None = None) -> P | None:
        begun = self._source.prepare(None if position is None else self._kind.back(position))
        return None if begun is None else self._kind.count(begun)

    def live(self, after: P) -> Stream[P]:
        return CountedStream(self._source.live(self._kind.back(after)), self._kind)

    def scan(self, tables: Sequence[TableId], *, live: bool, where: str | None = None) -> Scan:
        return CountedScan(self._source.scan(tables, live=live, where=where), self._kind)

    def resume_scan(self, record: Mapping[str, Any]) -> Scan | None:
        found = self._source.resume_scan(record)
        return None if found is None else CountedScan[P](found, self._kind)


class CountedStream(Generic[P]):
    """A stream of it."""

    def __init__(self, stream: Stream, kind: Kind[P]) -> None:
        self._stream, self._kind = stream, kind

    def read(self, after: P, wait_seconds: float) -> Window[P] | None:
        window = self._stream.read(self._kind.back(after), wait_seconds)
        if window is None:
            return None
        ended = window.continued_end
        return Window(
            start=self._kind.count(window.start),
            end=self._kind.count(window.end),
            transactions=window.transactions,
            batches=tuple(map(self._placed, window.batches)),
            rows=window.rows,
            open=window.open,
            continues=window.continues,
            continued_end=None if ended is None else self._kind.count(ended),
            last_committed_at=window.last_committed_at,
        )

    def _placed(self, batch: ChangeBatch) -> ChangeBatch:
        at = batch.data.schema.get_field_index(change.POSITION)
        if at < 0:
            return batch
        texts = [str(self._kind.count(Lsn.parse(text))) for text in batch.data.column(at).to_pylist()]
        return replace(batch, data=batch.data.set_column(at, batch.data.schema.field(at), pa.array(texts)))

    def confirm(self, position: P) -> None:
        self._stream.confirm(self._kind.back(position))

    def close(self) -> None:
        self._stream.close()


class CountedScan(Generic[P]):
    """Tables of it being read."""

    def __init__(self, scan: Scan, kind: Kind[P]) -> None:
        self._scan, self._kind = scan, kind

    @property
    def start(self) -> P:
        return self._counted(self._scan.start)

    def _counted(self, position: Position) -> P:
        assert isinstance(position, Lsn)
        return self._kind.count(position)

    def record(self) -> Mapping[str, Any]:
        return self._scan.record()

    def begin(self, delivered: Collection[int]) -> bool:
        return self._scan.begin(delivered)

    def next(self, rows_max: int) -> ScanPiece | None:
        piece = self._scan.next(rows_max)
        return None if piece is None else replace(piece, position=self._counted(piece.position))

    @property
    def done(self) -> bool:
        return self._scan.done

    def close(self) -> None:
        self._scan.close()
