"""Programming problems with tests: MBPP and HumanEval in their published forms, and their published splits."""
