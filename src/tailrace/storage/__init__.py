"""Files, records and leases, on a disk or in an object store: one layer under log, lake and state."""
