"""What the log stores: commits, sealed files, schemas, and the records beside them."""
