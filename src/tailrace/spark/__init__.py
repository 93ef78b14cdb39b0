"""Everything that runs on Spark: sessions, table writers and the data source `cdc`."""
