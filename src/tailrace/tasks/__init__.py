"""Work that runs in Spark workers, and records shared with the driver; no pyspark."""
