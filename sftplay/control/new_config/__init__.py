"""A config for a data file: what its rows are, which model fits this machine, and the text with its reasons."""
