"""Turns of something else between those of the model: environments and tools, in processes of their own."""
