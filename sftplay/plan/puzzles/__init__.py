"""What a run takes that learns puzzles (task hrm)."""
