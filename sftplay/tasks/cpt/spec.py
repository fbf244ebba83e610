"""Tasks cpt and cpt_mixed without torch. Rules of `datasets` and blocks are in `config.rules.documents`."""

from __future__ import annotations

from sftplay.config.rules.task_spec import TaskSpec

SPEC = TaskSpec()
