"""Model shapes: the counts from which every byte of a plan follows, read from a config.json."""
