"""Which versions of the lake tables belong together."""
