"""Apply the log to lake tables: micro-batches, upkeep, and watches over source and lake."""
