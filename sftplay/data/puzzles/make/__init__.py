"""From files of puzzles to the folder of both splits."""
