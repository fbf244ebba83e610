"""The run's YAML: its sections, its rules, and how a file becomes a checked `RunConfig`."""
