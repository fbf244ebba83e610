"""Answer prompts with a model: chat, batches, sampling."""
