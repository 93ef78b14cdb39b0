"""What one rule does to the rows of one table."""
