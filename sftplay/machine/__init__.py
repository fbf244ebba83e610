"""What this machine is: facts with their reasons, never a decision."""
