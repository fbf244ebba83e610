"""Mazes on 30x30 grids, whose answer is the shortest way."""
