"""Hand a trained model on: merge, export, model card, serve."""
