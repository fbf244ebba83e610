"""Runs as jobs of a cluster: checked here, before they wait in a queue."""
