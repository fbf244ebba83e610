"""Boxes for programs: what runs inside, who opens them, and the verdict on what came back."""
