"""The verbs that prepare data and show it."""
