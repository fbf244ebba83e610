"""Measure models: perplexity, rewards, right programs, differences between two runs."""
