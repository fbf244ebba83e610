"""Train: what every task's training shares, from the set-up of a process to a sealed checkpoint."""
