"""Deliver one piece of a scan as batches of changes.

A batch begins after the last acknowledged row, so rows that were not acknowledged are handed out again. The scan's
record never runs ahead of the acknowledged rows: a row that rules turned into two is done when both are.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tailrace.capture.port import ScanPiece
from tailrace.model import change
from tailrace.model.batch import AnyWindow, ChangeBatch, Window
from tailrace.model.change import Operation
from tailrace.model.position_kinds import Position
from tailrace.runtime.output_batch import Limits, slice_window, window_bytes


@dataclass
class PieceDelivery:
    """The delivery of one piece of a scan, after the rules."""

    piece: ScanPiece
    window: AnyWindow
    source_rows: npt.NDArray[np.int64]
    """For each row, in order, the row of the piece that it was made of."""
    acknowledged: int = 0
    handed_out_until: int = 0

    def hand_out(self, limits: Limits) -> AnyWindow:
        """Return as many of the rows as a batch holds."""
        size = max(1, window_bytes(self.window))
        room = max(1, min(limits.rows, limits.bytes * self.window.rows // size))
        self.handed_out_until = min(self.acknowledged + room, self.window.rows)
        return slice_window(self.window, self.acknowledged, self.handed_out_until)

    @property
    def handed_out(self) -> AnyWindow | None:
        """The rows that are handed out and not acknowledged."""
        return (
            slice_window(self.window, self.acknowledged, self.handed_out_until)
            if self.acknowledged < self.handed_out_until
            else None
        )

    def scan_record_after(self, rows: int) -> Mapping[str, Any]:
        """Return the scan's record for after so many more rows are acknowledged."""
        after = self.acknowledged + rows
        if after >= self.window.rows:
            return self.piece.record(len(self.piece.data))
        # A row that rules turned into two is done when both are.
        whole = min(int(self.source_rows[after - 1]) + 1, int(self.source_rows[after])) if after else 0
        return self.piece.record(whole)


def window_of_piece(piece: ScanPiece, at: Position) -> AnyWindow:
    """Return rows of a scan as changes: operation `read`, no transaction, at the scan's position."""
    count, now = len(piece.data), time.time_ns() // 1000
    always = {
        change.OP: pa.repeat(pa.scalar(Operation.READ.value, pa.string()), count),
        change.SEQ: pa.array(np.arange(count), pa.int64()),
        change.POSITION: pa.repeat(pa.scalar(str(piece.position), pa.string()), count),
        change.TX: pa.repeat(pa.scalar(0, pa.int64()), count),
        change.TX_INDEX: pa.array(np.arange(count), pa.int32()),
        change.COMMITTED_AT: pa.repeat(pa.scalar(now, pa.timestamp("us", "UTC")), count),
    }
    own = [pa.field(change.stored_name(column.name), column.type) for column in piece.schema.columns]
    data = pa.RecordBatch.from_arrays(
        [*(always[field.name] for field in change.REQUIRED), *piece.data.columns],
        schema=pa.schema([*change.REQUIRED, *own]),
    )
    batch = ChangeBatch(schema=piece.schema, data=data)
    return Window(start=at, end=at, batches=(batch,), rows=count)
