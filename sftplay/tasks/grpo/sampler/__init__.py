"""What draws the completions, beside the model that learns: how far apart they are, and what it is sent."""
