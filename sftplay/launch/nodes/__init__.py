"""Runs over several nodes: the nodes meet, compare their reports and join one run."""
