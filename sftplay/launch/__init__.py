"""Commands and environments for the workers; following them until they end."""
