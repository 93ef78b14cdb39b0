"""Reading a source log: the port that every source implements, and the sources."""
