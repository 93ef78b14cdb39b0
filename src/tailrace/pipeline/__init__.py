"""Settings become running objects here, and each table lives its life; nothing below imports this package."""
