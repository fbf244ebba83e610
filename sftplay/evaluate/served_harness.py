"""The harness's model where vLLM computes: prompts are made, checked and cut as for transformers, a server answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig

from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError
from sftplay.evaluate.harness import HarnessModel
from sftplay.model.tokenizer import shipped_end_ids

AT_ONCE = 128
"""Prompts of one request. vLLM cuts its own batches."""

LEAST_CHANGE = 1e-5
"""Log-probabilities of one prompt differ by less between two computations of the same model in fp32."""

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
"""Settings of a task that the server takes under the same name."""

Ask = Callable[[dict[str, Any]], dict[str, Any]]
"""A request to `/v1/completions` without the model's name -> the answer."""


class ServedHarnessModel(HarnessModel):
    """Everything but the two computations is the harness's and the kit's code for transformers."""

    least_change = LEAST_CHANGE

    def __init__(
        self, ask: Ask, folder: str, tokenizer: Any, renderer: Any | None, *, cfg: RunConfig,
    ) -> None:  # fmt: skip
        """`folder` has the config of the model that `ask` reaches, and its generation config where there is one."""
        try:
            generation = GenerationConfig.from_pretrained(folder)
        except OSError:
            generation = GenerationConfig()
        config = AutoConfig.from_pretrained(folder, trust_remote_code=cfg.model.trust_remote_code)
        shell = SimpleNamespace(device=torch.device("cpu"), config=config, generation_config=generation)
        super().__init__(shell, tokenizer, renderer, cfg=cfg)
        self.batch_size_per_gpu = AT_ONCE
        self._max_length = self.max_length - 2  # all that is scored goes there as a prompt, and one token comes back
        self._ask = ask
        self._ends = shipped_end_ids(generation)

    def score(self, ids: list[int]) -> torch.Tensor:
        """Return the log-probabilities of these ids, each behind those before it, `[ids - 1]`; of one id, that of
        itself again.
        """
        scored = self._score([(ids if len(ids) > 1 else ids * 2)[-self.max_length :]])[0]
        return torch.tensor([value for value, _ in scored])

    def _score(self, rows: Sequence[list[int]]) -> list[list[tuple[float, bool]]]:
        """Return log-probability of each id but the first, and whether it is the likeliest."""
        body = {"prompt": rows, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0, "detokenize": False}
        found = []
        for row, choice in zip(rows, self._choices(body), strict=True):
            places = zip(row[1:], choice["prompt_logprobs"][1:], strict=True)
            entries = [place[str(token)] for token, place in places]
            found.append([(entry["logprob"], entry["rank"] == 1) for entry in entries])
        return found

    def _choices(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the answers to the prompts of a request, in their order."""
        return sorted(self._ask(body)["choices"], key=lambda choice: int(choice["index"]))

    def _loglikelihood_tokens(self, requests: list[Any], *_: Any, **__: Any) -> list[tuple[float, bool]]:
        found = []
        for start in range(0, len(requests), AT_ONCE):
            part = requests[start : start + AT_ONCE]
            self._count_cut(part)
            rows = [[*context, *end][-(self.max_length + 1) :] for _, context, end in part]
            for (key, _, end), scored in zip(part, self._score(rows), strict=True):
                behind = scored[-len(end) :]
                answer = (sum(value for value, _ in behind), all(is_first for _, is_first in behind))
                found.append(answer)
                if key is not None:
                    self.cache_hook.add_partial("loglikelihood", key, answer)
        return found

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **settings: Any
    ) -> torch.Tensor:  # fmt: skip
        """Return prompts and answers as ids, `[rows, context + answer]`, as transformers' `generate` does."""
        mask = settings.pop("attention_mask").bool()
        is_sampled = settings.pop("do_sample", None)
        if unknown := sorted(set(settings) - set(SAMPLING)):
            what = f"a task wants {', '.join(unknown)} of generation, which vLLM does not take"
            raise ConfigError(what, where="--engine", fix="leave it out: transformers takes it")
        if is_sampled is False or (is_sampled is None and not settings.get("temperature")):
            settings = {key: settings[key] for key in ("repetition_penalty",) if key in settings}
            settings["temperature"] = 0
        body = {
            "prompt": [ids[kept].tolist() for ids, kept in zip(context, mask, strict=True)],
            "max_tokens": max_length - context.shape[1], "stop": [text for text in stop if text],
            "stop_token_ids": self._ends, "return_token_ids": True,
            "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, **settings,
        }  # fmt: skip
        answers = [torch.tensor(choice["token_ids"], dtype=context.dtype) for choice in self._choices(body)]
        pad = self.tokenizer.pad_token_id
        width = max(map(len, answers), default=0)
        padded = [torch.cat([answer, answer.new_full((width - len(answer),), pad)]) for answer in answers]
        return torch.cat([context, torch.stack(padded)], dim=1)
