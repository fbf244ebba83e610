"""A plan for people: tables, advice, comparisons, what a run costs."""
