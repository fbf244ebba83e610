"""Jobs and verdicts: what is asked of a program in a box, and how its answers are judged."""
