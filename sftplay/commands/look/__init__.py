"""The verbs that look at plans, machines and runs."""
