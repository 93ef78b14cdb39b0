"""Reads a table of the source with Spark, at one position."""
