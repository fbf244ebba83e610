"""The training tasks and the steps they share."""

TASKS = {
    "sft": "sftplay.tasks.sft",
}
"""task_mode -> its module, which defines the functions of `run.task.Task`."""
