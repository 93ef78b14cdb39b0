"""What a person or an API asks of a pipeline: loads, replays, rebuilds, and a look at its log."""
