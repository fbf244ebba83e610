"""What a run does with its evaluations: the gate between the stages, figures of before a resume, a start refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from torch import nn

from sftplay.data.load_prompts import Question
from sftplay.errors import RunError
from sftplay.heartbeat import Heartbeat
from sftplay.tasks.score.evaluation import EpisodeResult, EvaluateEpisodes

STAGE1, STEPS, N = 2, 4, 4
OPTIMIZER = SimpleNamespace(state={})


def evaluated(n_first: int, n_second: int) -> list[Any]:
    """Episodes of which so many first and second answers are right."""
    given = {"is_known": True, "form_first": False, "form_second": False, "is_parsed": False, "leak": False}
    results = [
        EpisodeResult(
            first=float(n < n_first), second=float(n < n_second), n_cut=0, hint_tokens=1, edit_ratio=0.5,
            is_identical=False, **given,
        )
        for n in range(N)
    ]  # fmt: skip
    return [(n, result, {"row": n}) for n, result in enumerate(results)]


class Course:
    """A run that is nothing but its evaluations: right first and second answers at each, and KL of turn 1."""

    def __init__(
        self,
        folder: Path,
        *,
        kl_t1: float = 0.001,
        min_hint_gain: float = 0.2,
        best_metric: str | None = None,
        **columns: str,
    ) -> None:
        score = SimpleNamespace(
            stage1_steps=STAGE1,
            kl1_max=0.03,
            eval_temperature=0.0,
            min_hint_gain=min_hint_gain,
            guidance="model_trained",
        )
        self.state = SimpleNamespace(global_step=0, max_steps=STEPS, best_metric=None, best_global_step=None)
        self.trainer = SimpleNamespace(
            state=self.state, figures={"kl_t1": kl_t1}, held_out_figures={}, heartbeat=Heartbeat(),
            args=SimpleNamespace(output_dir=str(folder / "checkpoints")),
        )  # fmt: skip
        cfg: Any = SimpleNamespace(score=score, train=SimpleNamespace(best_metric=best_metric))
        questions = [Question(n, [], "1+1=", dict(columns)) for n in range(N)]
        self.callback = EvaluateEpisodes(cfg, questions, folder=folder, every=STAGE1)
        self.callback.attach(self.trainer)
        self.n_played = 0

    def end_step(self, step: int, *right: int) -> SimpleNamespace:
        def sample(*kinds: str, **_: Any) -> list[Any]:
            self.n_played += 1
            return [evaluated(*right)] * len(kinds)

        self.state.global_step = step
        control = SimpleNamespace(should_log=False, should_save=False)
        with patch.object(self.callback, "_sample", sample):
            self.callback.on_step_end(None, self.state, control, model=nn.Linear(1, 1), optimizer=OPTIMIZER)
        return control


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    lines: list[str] = []
    monkeypatch.setattr("sftplay.log.say", lambda text, *_: lines.append(text))
    return lambda: "\n".join(lines)


@pytest.mark.parametrize(
    ("kl_t1", "right", "faults"),
    [
        (0.029, (1, 3), ()),
        (0.03, (1, 3), ("turn 1 has moved from the reference (KL 0.03, score.kl1_max 0.03)",)),
        (0.019, (3, 3), ("second answers are no better than first ones (delta +0.000)",)),
        (0.5, (3, 2), ("(KL 0.5, score.kl1_max 0.03) and ", "(delta -0.250)")),
    ],
)
def test_the_gate_asks_for_a_first_answer_that_stayed_and_a_second_one_that_is_better(
    kl_t1, right, faults, tmp_path: Path, said: Callable[[], str]
):
    course = Course(tmp_path, kl_t1=kl_t1)
    course.end_step(STAGE1, *right)
    assert all(fault in said() for fault in faults)
    assert ("warning: stage 1 ends" in said()) == bool(faults)
    assert ("stage 1 ends: KL of turn 1 0.029, delta +0.500; stage 2 begins" in said()) == (not faults)
    course.end_step(STEPS, *right)
    assert said().count("stage 1 ends") == 1


def test_an_evaluation_of_before_a_resume_is_not_played_again_and_counts_as_it_did(
    tmp_path: Path, said: Callable[[], str]
):
    course = Course(tmp_path)
    course.end_step(STAGE1, 3, 3)
    again = Course(tmp_path)
    again.end_step(STAGE1, 0, 0)
    assert (course.n_played, again.n_played) == (1, 0)
    assert again.trainer.held_out_figures == course.trainer.held_out_figures
    assert again.trainer.held_out_figures["eval_acc_t2"] == 0.75
    assert said().count("warning: stage 1 ends, but second answers are no better") == 2


def test_rows_without_an_answer_are_named_where_a_right_hint_would_state_it(tmp_path: Path):
    with pytest.raises(RunError, match="no problem has an answer") as refused:
        Course(tmp_path, tests="assert True").callback._check_min_hint_gain()
    assert "column answer" in refused.value.fix
    Course(tmp_path, min_hint_gain=0).callback._check_min_hint_gain()


def test_a_checkpoint_is_written_wherever_more_second_answers_are_right_than_before(tmp_path: Path):
    for best_metric, saves, best in (("acc_t2", [True, True, False, False], 4), (None, [False] * 4, None)):
        course = Course(tmp_path / str(best_metric), best_metric=best_metric)
        n_right = {2: 0, 4: 3, 6: 3, 8: 2}
        assert [course.end_step(step, 0, right).should_save for step, right in n_right.items()] == saves
        assert course.state.best_global_step == best
