"""The training tasks and the ceremony they share."""
