"""What a run has left in its folder, read for the report; every file may be missing or broken."""
