"""Files, records and leases on a disk or in an object store.

Log, lake and state all use this layer.
"""
