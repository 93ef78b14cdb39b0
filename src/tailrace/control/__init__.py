"""Actions on request: loads, replays, rebuilds, and views of the log."""
