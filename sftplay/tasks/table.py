"""The tasks there are: one row each. Adding a task means adding a module with `run` and a row here."""

TASKS = {
    "sft": "sftplay.tasks.sft",
}
"""task_mode -> module with `run(cfg, folder, stop) -> Outcome`."""
