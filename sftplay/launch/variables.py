"""Environment variables by which the parent of a run speaks to its workers."""

PARENT = "SFTPLAY_PARENT"  # The parent sets it to its own pid. By this a worker sees whether its parent is still alive.
EXPECTS_GPU = "SFTPLAY_EXPECTS_GPU"
"""The parent sets it where the run is planned for a GPU. A worker that finds none ends."""

PASSED_ON = "SFTPLAY_PASSED_ON"
"""The parent sets it to the names of the variables that a launcher passes on to processes on other machines."""
