"""The capture side of a pipeline, in a process of its own."""
