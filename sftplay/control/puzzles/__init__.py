"""Runs that learn puzzles: what is known of them before they start."""
