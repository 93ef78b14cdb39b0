"""Store, classify and convert changes that a lake table cannot take."""
