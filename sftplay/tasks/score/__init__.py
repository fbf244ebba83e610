"""Two-turn episodes: a solver answers, a guide writes a hint, the solver answers again, and both learn (task score)."""
