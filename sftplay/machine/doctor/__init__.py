"""What would go wrong on this machine, each finding with its remedy."""
