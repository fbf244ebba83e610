"""Supervised fine-tuning: the labelled spans of chats, completions and plain text (task sft)."""
