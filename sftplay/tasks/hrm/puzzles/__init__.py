"""Puzzles as grids of tokens: the folder that holds them, and which rows a process learns from in each step."""
