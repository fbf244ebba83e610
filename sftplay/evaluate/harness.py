"""Tasks of lm-evaluation-harness on a model that the kit has opened, asked as its run was trained."""

from __future__ import annotations

import logging
import random
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lm_eval import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager

from sftplay import log
from sftplay.atomic import write_text
from sftplay.config.run import RunConfig
from sftplay.data.records import Message
from sftplay.errors import ConfigError, DataError, MachineError, RunError, SftplayError, suggest
from sftplay.evaluate.boxed_code import BoxedCodeEval, find_unboxed
from sftplay.evaluate.comparison import as_finite
from sftplay.evaluate.evaluate import find_autocast
from sftplay.model.hub import describe_error, refusing
from sftplay.model.tokenizer import set_end_tokens

SEEDS = {"random": 0, "numpy": 1234, "torch": 1234, "fewshot": 1234}
"""The harness's defaults, with which published figures are made."""

Score = Callable[[list[int]], torch.Tensor]
"""Token ids of a prompt -> the scores of the token behind it, `[vocabulary]`."""


class HarnessModel(HFLM):
    """The harness's model for transformers. It checks what reaches the model, instead of trusting that it does.

    Every prompt by the chat template must be the text and the tokens of the kit's own renderer. The first request of an
    evaluation must be scored otherwise than by `score_base`: an adapter that has no effect is easily overlooked
    (https://github.com/EleutherAI/lm-evaluation-harness/issues/1841).
    """

    least_change = 0.0
    """Scores that differ by no more count as the same."""

    def __init__(self, model: Any, tokenizer: Any, renderer: Any | None, *, cfg: RunConfig) -> None:
        """`renderer` None asks with plain documents, for models that have learned no template."""
        if renderer is not None:
            set_end_tokens(model.generation_config, tokenizer)  # a base may know its own end token alone
        # The harness ties weights anew, by paths that an adapter's wrappers have changed. They are as they were loaded.
        model.tie_weights = lambda: None
        super().__init__(
            pretrained=model, backend="causal", tokenizer=tokenizer, batch_size=cfg.eval.batch_size,
            mixed_precision_dtype=find_autocast(model, cfg) if isinstance(model, torch.nn.Module) else None,
            add_bos_token=None if renderer is None else False,  # a template writes the BOS itself, where there is one
        )  # fmt: skip
        del model.tie_weights
        self._renderer, self.asks_by_template = renderer, renderer is not None
        self._special = [str(token) for token in tokenizer.added_tokens_decoder.values()]
        self.score_base: Score | None = None
        self.base_name = ""
        """What `score_base` and this model must not agree on."""

        self.first_prompt: list[int] = []
        self.counts = {"cut": 0, "special_tokens_typed": 0, "system_left_out": 0}
        """Prompts that lost their beginning, as the model reads no more; whose rows type special tokens, which the
        harness reads as control; whose system turn the template refuses, so that the harness leaves it out."""

    def score(self, ids: list[int]) -> torch.Tensor:
        """Return the scores of the token behind these."""
        return self._model_call(torch.tensor([ids[-self.max_length :]], device=self.device))[0, -1]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the prompt as the harness renders it. Raise RunError where the kit renders it otherwise."""
        assert self._renderer is not None
        prefill = "" if add_generation_prompt else chat_history[-1]["content"]
        asked = chat_history if add_generation_prompt else chat_history[:-1]
        turns: list[Any] = [Message(turn["role"], turn["content"]) for turn in asked]  # type: ignore[arg-type]
        try:
            expected = self._renderer.prompt_text(turns)
        except DataError:
            if turns[0].role != "system":
                raise
            self.counts["system_left_out"] += 1
            return self.apply_chat_template(chat_history[1:], add_generation_prompt)
        text: str = super().apply_chat_template(chat_history, add_generation_prompt)
        fix = "report it with the template; ARGS=--no-template asks without one"
        behind = text.removeprefix(expected)
        if (behind.strip() if prefill else behind) != prefill.strip():
            what = f"the harness asks {text[-300:]!r}, and the run was trained to be asked {expected[-300:]!r}"
            raise RunError(what, where="chat template", fix=fix)
        wanted: list[int] = []
        with suppress(DataError):  # special tokens are typed that cannot be kept apart from control
            wanted = self._renderer.prompt_ids(turns)
        if not prefill and (given := self.tok_encode(text)) != wanted:
            if not any(token in turn.content for turn in turns for token in self._special):
                what = f"the harness reads {given[:8]}... where the run was trained on {wanted[:8]}..."
                raise RunError(what, where="tokens of the prompt", fix=fix)
            self.counts["special_tokens_typed"] += 1
        return text

    def tok_batch_encode(
        self, strings: list[str], padding_side: str = "left", left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Return ids and mask, and count what is cut."""
        ids, mask = super().tok_batch_encode(strings, padding_side, None, truncation)
        kept = left_truncate_len or ids.shape[1]
        self.counts["cut"] += int((mask.sum(dim=1) > kept).sum())
        return ids[:, -kept:], mask[:, -kept:]

    def _loglikelihood_tokens(self, requests: list[Any], *args: Any, **options: Any) -> Any:
        self._count_cut(requests)
        return super()._loglikelihood_tokens(requests, *args, **options)

    def _count_cut(self, requests: Sequence[Any]) -> None:
        self.counts["cut"] += sum(len(context) + len(end) > self.max_length + 1 for _, context, end in requests)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Return log-likelihood of each continuation, and whether it is the likeliest."""
        self._begin(requests, "continuations scored")
        return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """Return the log-likelihood of each text."""
        self._begin(requests, "texts scored")
        return super().loglikelihood_rolling(requests, disable_tqdm=True)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """Return an answer to each prompt."""
        wanted = (normalize_gen_kwargs(request.args[1], self.max_gen_toks)["max_gen_toks"] for request in requests)
        longest = max(wanted, default=0)
        if longest >= self.max_length:
            what = f"a task wants answers of {longest:,} tokens, and the model reads {self.max_length:,} in all"
            raise ConfigError(what, where="--tasks", fix="choose tasks with shorter answers")
        self._begin(requests, "prompts answered")
        return super().generate_until(requests, disable_tqdm=True)

    def _begin(self, requests: Sequence[Any], what: str) -> None:
        """Check the first request of an evaluation that has a text, and show how far the others are."""
        self.set_cache_hook(_Progress(len(requests), what))
        texts = (text for request in requests for text in request.args if text and isinstance(text, str))
        if self.first_prompt or not (text := next(texts, "")):
            return
        self.first_prompt = self.tok_encode(text)
        if self.score_base is not None:
            ours, others = self.score(self.first_prompt), self.score_base(self.first_prompt)
            if bool(((ours - others.to(ours.device)).abs() <= self.least_change).all()):
                what = f"changes no score of the first prompt: {text[:120]!r} ... is answered as by the base"
                raise RunError(what, where=self.base_name, fix="look at the run's losses: it may have learned nothing")


class _Progress:
    """Counts the answers as the harness hands them to its cache."""

    def __init__(self, total: int, what: str) -> None:
        self._done, self._total, self._what = 0, total, what

    def add_partial(self, *_: Any) -> None:
        """Take note of one answer."""
        self._done += 1
        log.progress(min(self._done, self._total), self._total, what=self._what, tag="lm-eval")


class KeptTasks(TaskManager):
    """The harness's tasks, each loaded once: both models are asked the same."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._kept: dict[str, Any] = {}

    def _load_spec(self, spec: str) -> Any:
        if spec not in self._kept:

            def explain(error: Exception) -> SftplayError:
                if isinstance(error, ModuleNotFoundError):
                    what, fix = f"needs the package {error.name}", f".venv/bin/python -m pip install {error.name}"
                    return MachineError(what, where=f"task {spec}", fix=fix)
                what = f"cannot be loaded ({describe_error(error)})"
                fix = "check the connection (HF_HUB_OFFLINE=1: take it from the cache alone), or name local rows in"
                return DataError(what, where=f"task {spec}", fix=f"{fix} a task file of yours: --include-path")

            with refusing(explain):
                self._kept[spec] = super()._load_spec(spec)
        return self._kept[spec]


def load_tasks(names: Sequence[str], include_path: str | None, *, boxed: BoxedCodeEval) -> tuple[KeptTasks, list[str]]:
    """Return the tasks of these names, which may be groups, and the names; patterns with `*` mean all that fit.

    Raise ConfigError for an unknown name; DataError where a data set cannot be loaded; MachineError where a package is
    missing, or where a task could run a model's programs outside the box.
    """
    for library in ("lm_eval", "datasets", "huggingface_hub", "evaluate"):
        logging.getLogger(library).setLevel(logging.ERROR)
    manager = None
    log.status("reading the harness's tasks and their rows", "lm-eval")
    if include_path:  # to index the harness's own 14,000 tasks takes seconds
        manager = KeptTasks(include_path=include_path, include_defaults=False)
    if manager is None or not set(names) <= set(manager.all_subtasks):
        manager = KeptTasks(include_path=include_path)
    found: list[str] = []
    for name in names:
        matched = manager.match_tasks([name])
        if not matched:
            fix, near = suggest(name, manager.all_tasks, "`.venv/bin/lm-eval ls tasks` lists them")
            raise ConfigError(f"the harness has no task {name!r}", where="--tasks", fix=fix, nearest=near)
        found += [task for task in matched if task not in found]
    try:
        loaded = manager.load(found)["tasks"]
    except ValueError as error:  # what a task's own loading raises has become another error by now
        raise ConfigError(str(error), where="--tasks", fix="name each task once, alone or by its group") from error
    for name, task in loaded.items():
        if problem := find_unboxed(task, boxed):
            fix = "leave it out; humaneval and mbpp run in the box, and so does make eval-code"
            raise MachineError(f"is refused: {problem}", where=f"task {name}", fix=fix)
        if task.config.process_results is None and None in getattr(task, "_metric_fn_list", {}).values():
            metric = next(metric for metric, function in task._metric_fn_list.items() if function is None)
            fix = "check the connection and the metric's name; it comes from the hub"
            raise DataError(f"its metric {metric} cannot be loaded", where=f"task {name}", fix=fix)
    return manager, found


def run_tasks(
    model: HarnessModel, tasks: KeptTasks, *, names: Sequence[str], system: str | None, limit: int | None,
    fewshot: int | None, log_file: Path,
) -> dict[str, Any]:  # fmt: skip
    """Return what the harness returns for this model.

    A library's failure is a RunError, and its traceback goes to `log_file`.
    """

    def explain(error: Exception) -> RunError:
        with suppress(OSError):
            write_text(log_file, traceback.format_exc())
        return RunError(f"the harness failed ({describe_error(error)})", where="lm-eval", fix=f"see {log_file}")

    is_chat, model.first_prompt = model.asks_by_template, []
    with refusing(explain):
        loaded = tasks.load(list(names))
        # As in `simple_evaluate`, which also asks ten programs for this machine's versions: that takes seconds.
        random.seed(SEEDS["random"])
        np.random.seed(SEEDS["numpy"])
        torch.manual_seed(SEEDS["torch"])
        for task in loaded["tasks"].values():
            default = task.get_config("num_fewshot")
            if fewshot is not None and default != 0:  # 0 in a task's file says that examples make no sense
                task.set_config(key="num_fewshot", value=fewshot)
            elif default is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=SEEDS["fewshot"])
        found: dict[str, Any] = evaluate(
            lm=model, task_dict=loaded, limit=limit, apply_chat_template=is_chat, fewshot_as_multiturn=is_chat,
            system_instruction=system if is_chat else None, confirm_run_unsafe_code=True,
        )  # fmt: skip
    return found


def read_figures(found: dict[str, Any]) -> dict[str, dict[str, dict[str, float | None]]]:
    """Return task or group -> metric -> value and its standard error, null where there is none.

    The name of a metric's filter follows behind a comma, such as `exact_match,strict-match`, where it is not `none`.
    """
    # The harness writes N/A, and JSON has no word for what is not finite.
    figures: dict[str, dict[str, dict[str, float | None]]] = {}
    for task, row in (found["results"] | found.get("groups", {})).items():
        for key, value in row.items():
            metric, _, kind = key.partition(",")
            if kind and not metric.endswith("_stderr") and isinstance(value, int | float):
                cell = {"value": as_finite(value), "stderr": as_finite(row.get(f"{metric}_stderr,{kind}"))}
                figures.setdefault(task, {})[metric if kind == "none" else key] = cell
    return figures


def read_answers(found: dict[str, Any], side: str) -> Iterator[dict[str, Any]]:
    """Yield a line for each row of each task: the prompt, what the model said, and what the metrics say of it."""
    for task, rows in found["samples"].items():
        for row in rows:
            metrics = {name: row.get(name) for name in row["metrics"]}
            yield {
                "side": side, "task": task, "row": row["doc_id"], "filter": row["filter"],
                "prompt": row["arguments"][0][0], "answers": row["resps"], "target": row["target"], "metrics": metrics,
            }  # fmt: skip
