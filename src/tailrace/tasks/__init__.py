"""What runs in a Spark worker; nothing in here imports pyspark."""
