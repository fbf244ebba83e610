"""Answers of a trained model: a chat, a file, one row after another."""
