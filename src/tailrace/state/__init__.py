"""Durable state of a capture: checkpoints and schema history."""
