"""Make OUT and its report from a folder: the walk, the stages one after another, the results kept for a resume."""
