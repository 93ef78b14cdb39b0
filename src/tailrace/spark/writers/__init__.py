"""Lake tables written by Spark's Delta and Iceberg connectors."""
