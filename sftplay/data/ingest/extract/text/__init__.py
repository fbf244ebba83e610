"""Plain text, and the characters of all files of text."""
