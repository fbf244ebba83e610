"""report.html of a run, and two runs side by side."""
