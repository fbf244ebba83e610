"""Puzzles as people write and read them."""
