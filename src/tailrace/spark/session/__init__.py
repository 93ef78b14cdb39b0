"""Starts Spark, its connectors and its workers."""
