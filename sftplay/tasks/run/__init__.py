"""The ceremony every trainer shares: before, around and behind its steps."""
