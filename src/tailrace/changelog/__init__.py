"""The durable, ordered log of many tables, between capture and its readers."""
