"""The tables of a pipeline: the state of each, and whether it can resume."""
