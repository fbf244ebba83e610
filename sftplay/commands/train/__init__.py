"""The verbs that train."""
