"""Every row tokenized once, in processes, counted and kept on disk."""
