"""Comparisons with other ways to train; see docs/benchmarks.md."""
