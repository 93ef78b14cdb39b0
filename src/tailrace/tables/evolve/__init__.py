"""What a schema change at the source does to a lake table."""
