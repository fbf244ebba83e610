"""What episodes are worth and what is learned from them: tensors in, tensors out; no model is loaded here."""
