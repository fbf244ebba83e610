"""A toy task: rows of numbers, and the model learns to say the next one."""
