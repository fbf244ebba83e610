"""Rewards of a config on the rows of its data: tried by `reward-check`, and before a run learns from them."""
