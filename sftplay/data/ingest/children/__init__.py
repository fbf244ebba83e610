"""Child processes with bounds on time and memory, forked from one warm parent."""
