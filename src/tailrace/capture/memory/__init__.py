"""A source in memory: what a database promises, without one."""
