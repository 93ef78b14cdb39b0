"""The settings file: its models, and every mistake in it with line and remedy."""
