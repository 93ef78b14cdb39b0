"""Steps: what one rule does to the rows of one table."""
