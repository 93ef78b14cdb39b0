"""Work that runs in Spark workers; nothing in here imports pyspark."""
