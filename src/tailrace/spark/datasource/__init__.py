"""Spark's `format("cdc")`: a change log as a stream, a database table as a DataFrame."""
