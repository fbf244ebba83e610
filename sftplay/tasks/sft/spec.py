"""Task sft without torch: nothing differs from what the trunk assumes."""

from __future__ import annotations

from sftplay.config.rules.task_spec import TaskSpec

SPEC = TaskSpec()
