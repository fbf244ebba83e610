"""What the parent does while workers run: their lines, their end, and whether they go on."""
