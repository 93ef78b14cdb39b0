"""Read an Iceberg table's metadata without Spark."""
