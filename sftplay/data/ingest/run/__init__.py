"""From a folder to OUT and its report: the walk, the stages one after another, what is kept for a resumed command."""
