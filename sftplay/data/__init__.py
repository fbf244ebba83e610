"""From foreign files to token ids with labels, every row accounted for."""
