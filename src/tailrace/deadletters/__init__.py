"""Changes that a lake table cannot take: storing, classifying and converting them."""
