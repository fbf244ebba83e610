"""Terms of a domain as tokens of their own: found, put into the tokenizer, and given rows in the model."""
