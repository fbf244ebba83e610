"""What a completion says: its program between other text."""
