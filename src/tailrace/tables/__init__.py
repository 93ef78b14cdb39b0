"""Lake tables: changes are folded to one row per key, then merged in one commit that also holds the position."""
