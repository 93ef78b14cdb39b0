"""The durable, ordered, many-table log between capture and everyone who reads."""
