"""The sections of a run's YAML, one a file: frozen, typed, documented field by field."""
