"""What all checks of `make gpu-check` share: a process and a time limit for each, the kit's own runs, the table."""
