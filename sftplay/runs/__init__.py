"""Start, resume, submit and check runs: what a verb does before and after the processes that train."""
