"""Rows as prompts: what a model is asked, and the columns by which its answers are judged."""
