"""Kinds of GPUs by name, and which part of a run lies on which device."""
