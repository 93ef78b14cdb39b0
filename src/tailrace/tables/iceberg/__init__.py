"""What an Iceberg table says of itself, read without Spark."""
