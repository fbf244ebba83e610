"""The part of a report about a run that learns from rewards."""
