"""The verbs that use a finished run."""
