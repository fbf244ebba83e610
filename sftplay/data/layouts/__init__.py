"""Foreign layouts of a row to the canonical records."""
