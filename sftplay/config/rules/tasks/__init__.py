"""Rules of single tasks."""
