"""From `auto` to numbers: each decision with its reason."""
