"""Several nodes: they meet, compare themselves and join one run."""
