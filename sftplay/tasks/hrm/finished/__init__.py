"""Finished runs of task hrm: measured again, and used to solve a puzzle."""
