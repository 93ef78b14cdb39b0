"""Rules between source and log: they hide, filter, rename, compute and route."""
