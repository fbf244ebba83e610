"""From text to values that remember where they were written, and back to text."""
