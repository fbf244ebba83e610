"""The training tasks and the steps they share."""

TASKS = {
    "sft": "sftplay.tasks.sft",
    "cpt": "sftplay.tasks.cpt",
    "cpt_mixed": "sftplay.tasks.cpt",
    "grpo": "sftplay.tasks.grpo.task",
}
"""task_mode -> its module, which defines the functions of `run.task.Task`."""
