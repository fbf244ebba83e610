"""The verbs about configs and downloads."""
