"""Learn a score for answers from pairs, for GRPO to learn from (task reward_model)."""
