"""The command line: parse, call, render. It decides nothing about data."""
