"""Chat templates: which one, what it writes, and where the assistant's turns lie in it."""
