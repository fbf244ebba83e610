"""The report on a run that answers twice: what the second turn does, and episodes to read."""
