"""What the model learns by: losses, an optimizer of its own, and the moving average of its weights."""
