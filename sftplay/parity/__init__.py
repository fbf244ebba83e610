"""Hold what an engine answers against the trained model: prompt ids, greedy ids, log-probabilities."""
