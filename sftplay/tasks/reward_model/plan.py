"""The reward model in the plan: a step of pairs as in tasks of preferences, and none of their words is scored."""

from __future__ import annotations

from sftplay.config.run import RunConfig
from sftplay.machine.probe import Machine
from sftplay.plan.sizing import Decision, Decisions
from sftplay.tasks.preference.plan import PreferencePlan


class RewardModelPlan(PreferencePlan):
    """Pairs without a reference and without a head over the vocabulary."""

    def fixed_head(self, cfg: RunConfig) -> Decision | None:
        return Decision("standard", "a score for an answer takes no loss over the vocabulary")

    def decide_more(self, cfg: RunConfig, machine: Machine) -> Decisions:
        return {"train.packing": Decision(False, "a score needs the end of each answer")}


PLAN = RewardModelPlan()
