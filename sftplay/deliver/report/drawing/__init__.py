"""How figures, curves and the page of a report are drawn; it knows nothing of runs."""
