"""Sudoku of any size: solutions, symmetries, files of puzzles."""
