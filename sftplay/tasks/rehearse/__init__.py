"""Short runs before a run: a step's memory, the speed of communication."""
