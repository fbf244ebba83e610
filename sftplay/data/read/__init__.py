"""Files, folders and hub data sets to raw rows, each with the place it came from."""
