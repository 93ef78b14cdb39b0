"""Reads a change log with Spark, as a batch and as a stream."""
