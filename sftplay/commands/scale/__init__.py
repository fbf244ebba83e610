"""The verbs about many processes."""
