"""From a record to token ids and labels: chat templates, their masks, special tokens."""
