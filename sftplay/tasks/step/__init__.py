"""One optimizer step: the window, its micro-batches, what is run again."""
