"""Delta tables, written without Spark."""
