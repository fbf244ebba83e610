"""A small recurrent model that learns puzzles from nothing and refines its answer segment by segment (task hrm)."""
