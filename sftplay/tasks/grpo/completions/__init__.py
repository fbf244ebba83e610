"""Completions between the sampler and the loss: what the sampler is sent, how far it is off, how they are ordered."""
