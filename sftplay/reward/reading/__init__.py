"""What a completion says: its program between other text, its statement of an answer, the number in that."""
