"""What a capture must remember beside its rows: how far it came, and every shape of a table."""
