"""Reading a database's log: the port every source implements, and the sources."""
