"""Built-in models of one task each, for runs that show how a task of the kit works."""
