"""The demonstration: a private PostgreSQL, a shop that is busy, and a comparison that trusts nobody.

Nothing in the product imports this package; tests and benchmarks do.
"""
