"""Starting Spark, its connectors and its workers."""
