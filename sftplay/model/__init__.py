"""From a name to a model and a tokenizer."""
