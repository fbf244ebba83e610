"""Episodes: how prompts are put together from token ids, how actions are sampled, and what episodes say in figures."""
