"""What the report shows of a run that learns puzzles."""
