"""What every trainer shares before, around and after its steps."""
