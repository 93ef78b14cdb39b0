"""Spark is where the data pipeline runs: a query that wakes the work, and tasks that do it."""
