"""The training tasks and the steps they share."""

TASKS = {
    "sft": "sftplay.tasks.sft",
    "cpt": "sftplay.tasks.cpt",
    "cpt_mixed": "sftplay.tasks.cpt",
    "grpo": "sftplay.tasks.grpo.task",
    "score": "sftplay.tasks.score.task",
    "hrm": "sftplay.tasks.hrm.task",
}
"""task_mode -> its module, which defines the functions of `run.task.Task`; or `run` alone, in place of all that
`run.run_task` does with them."""
