"""Examples as people read them: their text, and what is learned of it."""
