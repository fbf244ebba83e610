"""What a valid config must satisfy beyond the type of each value."""
