"""Rows that rules have left, numbered as those of a window are: from zero, without a gap, in the order they had."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa

from tailrace.model import change
from tailrace.model.batch import ChangeBatch


def renumber(batches: tuple[ChangeBatch, ...]) -> tuple[ChangeBatch, ...]:
    """The batches with `_seq` counting from zero without a gap, in the order it had."""
    if not batches:
        return ()
    seqs = [batch.data.column(change.SEQ).to_numpy() for batch in batches]
    every = np.concatenate(seqs)
    numbers = np.empty(every.size, np.int64)
    numbers[np.argsort(every, kind="stable")] = np.arange(every.size)
    found, begin = [], 0
    for batch, mine in zip(batches, seqs, strict=True):
        now = numbers[begin : begin + mine.size]
        begin += mine.size
        place = batch.data.schema.get_field_index(change.SEQ)
        data = batch.data
        if not np.array_equal(now, mine):
            data = data.set_column(place, data.schema.field(place), pa.array(now))
        found.append(replace(batch, data=data, ends=(int(now[0]), int(now[-1]))))
    return tuple(found)
