"""The files of the log: commits, sealed files, schemas, and the records next to them."""
