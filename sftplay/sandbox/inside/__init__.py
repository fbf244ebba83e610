"""What runs inside the box. It needs nothing but the standard library, and imports as little of it as it can."""
