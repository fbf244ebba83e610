"""New tokens for terms of a domain: find the terms, extend the tokenizer, and add rows to the model."""
