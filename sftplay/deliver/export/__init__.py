"""A trained model for others: merged, checked, exported, served."""
