"""What is said about a config: problems with their remedies, the manual, the names that other kits use."""
