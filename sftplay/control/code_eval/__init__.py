"""Asking a model many questions: which weights are meant, and how several processes share the work."""
