"""Held-out rows measured: exact loss, and answers compared with references."""
