"""What is started: the command and environment of a run's workers. Nothing is started here."""
