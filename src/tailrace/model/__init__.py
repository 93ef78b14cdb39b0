"""The values that flow through Tailrace; no I/O and no clock in here."""
