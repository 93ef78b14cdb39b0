"""Plan and apply the effect of a source's schema change on its lake table."""
