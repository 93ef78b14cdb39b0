"""Lake tables. Fold changes to one row per key, then merge them in one commit with the position."""
