"""What is watched while a run learns from rewards: the base under an adapter, and what there is to learn from."""
