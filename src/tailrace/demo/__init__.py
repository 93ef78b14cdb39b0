"""The demonstration: a private PostgreSQL, a busy shop, and an independent comparison.

Nothing in the product imports this package; tests and benchmarks do.
"""
