"""The settings file: what it may say, and every mistake in it with its line and remedy."""
