"""PostgreSQL: logical replication through libpq, decoded into Arrow by compiled kernels."""
