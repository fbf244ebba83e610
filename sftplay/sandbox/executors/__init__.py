"""What a box is made of: bubblewrap, landlock, or nothing at all."""
