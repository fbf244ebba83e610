"""What public measuring scripts run, and the rows that they measured, for `memory_accuracy.py`."""
