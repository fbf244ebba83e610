"""What looks on while a run trains: meters, guards, recovery."""
