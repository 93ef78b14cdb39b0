"""A source in memory, with the promises of a database."""
