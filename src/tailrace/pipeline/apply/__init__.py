"""The apply side of a pipeline: micro-batches, upkeep, and the watch over both ends."""
