"""What a sampler may hold instead of the present model: weights before the last update, the run's first head, other
prompts; and how a vLLM server is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sftplay.errors import SftplayError
from sftplay.export.merge import find_base
from sftplay.launch.run_folder import RunFolder
from sftplay.tasks.grpo.sampler_faults import Row, SamplerFacts

MOST_PROMPTS = 1024
"""Prompts that are kept where a server reads others than it was sent: one is enough to name the fault."""


@torch.no_grad()
def find_old_weights(trainer: Any) -> dict[str, Tensor]:
    """Return the trained weights before the last update, out of AdamW's own state, so that no step keeps a copy.

    Empty before the first update, and with another optimizer than torch's AdamW. The update is taken back (torch 2.13,
    optim/adamw.py): w = (w' + rate m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)) / (1 - rate * decay).
    """
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    if optimizer is None or not type(optimizer).__name__.startswith("AdamW"):
        return {}
    names = {id(weight): name for name, weight in trainer.model.named_parameters()}
    rates, found = find_last_rates(trainer), dict[str, Tensor]()
    for number, group in enumerate(optimizer.param_groups):
        rate = rates[number] if number < len(rates) else float(group["lr"])
        for weight in group["params"]:
            state = optimizer.state.get(weight, {})
            if id(weight) not in names or not {"step", "exp_avg", "exp_avg_sq"} <= set(state):
                continue
            (first, second), count = group["betas"], float(state["step"])
            mean = state["exp_avg"].double() / (1 - first**count)
            scale = (state["exp_avg_sq"].double() / (1 - second**count)).sqrt() + group["eps"]
            before = (weight.double() + rate * mean / scale) / (1 - rate * group["weight_decay"])
            found[names[id(weight)]] = before.to(weight.dtype)
    return found


def find_last_rates(trainer: Any) -> list[float]:
    """Return the learning rate of the last update of each group; the schedule has gone on since."""
    schedule = trainer.lr_scheduler
    schedule = getattr(schedule, "scheduler", schedule)
    factors, last = getattr(schedule, "lr_lambdas", None), getattr(schedule, "last_epoch", 0) - 1
    if not factors or last < 0:
        return []
    return [float(rate) * float(factor(last)) for rate, factor in zip(schedule.base_lrs, factors, strict=True)]


def find_old_heads(trainer: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the head that the run started with, out of the base's files."""
    with suppress(SftplayError, OSError, SafetensorError, RuntimeError):
        folder = Path(find_base(trainer.cfg, RunFolder(trainer.run_folder))[0])
        tied = trainer.model.config.get_text_config().tie_word_embeddings
        ends = ("lm_head.weight", *(("embed_tokens.weight",) if tied else ()))
        for path in sorted(folder.glob("*.safetensors")) if folder.is_dir() else ():
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - a safe_open is no mapping
                    if name.endswith(ends):
                        yield "the one that the run started with", file.get_tensor(name)
                        return


def list_other_prompts(trainer: Any, row: Row) -> dict[str, list[int]]:
    """Return other ids of a row's prompt by what makes them: a first token, the model's own template, none at all."""
    tokenizer = trainer.processing_class
    found = {"without its first token": row.prompt[1:], "without its last token": row.prompt[:-1]}
    for name, token in (("<bos>", tokenizer.bos_token_id), ("<eos>", tokenizer.eos_token_id)):
        if token is not None:
            found[f"with {name} ({token}) before it"] = [token, *row.prompt]
    rows = trainer.questions.row_numbers
    if row.number in rows:
        question = trainer.questions[rows.index(row.number)].question
        found["the question without a template"] = list(tokenizer(question, add_special_tokens=False)["input_ids"])
        found["the question as plain text"] = list(tokenizer(question)["input_ids"])
        messages = [{"role": "user", "content": question}]
        with suppress(ValueError, TypeError, KeyError):  # jinja's errors are ValueErrors of transformers
            for words, named in (("without the system prompt", {"add_generation_prompt": True}),
                                 ("without the start of the answer", {})):  # fmt: skip
                ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **named)
                found[f"by its chat template {words}"] = list(ids)
    return {words: ids for words, ids in found.items() if ids and ids != row.prompt}


def read_server_facts(client: Any) -> SamplerFacts:
    """Return what a vLLM server says of itself, through TRL's client of it (trl 1.16, generation/vllm_client.py)."""
    dtype: str | None = None
    with suppress(RuntimeError, KeyError, TypeError):  # a server without its development endpoints
        dtype = str(client.get_server_info()["model_config"]["dtype"]).removeprefix("torch.")

    def score(prompt: list[int], answer: list[int]) -> list[float]:
        # A request for the log-probabilities of its prompt reads no prefix cache, and a greedy one no random numbers.
        body = {"prompt": [*prompt, *answer], "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        reply = client.session.post(f"{client.base_url}/v1/completions", json={"model": client.model, **body})
        reply.raise_for_status()
        places = reply.json()["choices"][0]["prompt_logprobs"][-len(answer) :]
        return [float(place[str(token)]["logprob"]) for place, token in zip(places, answer, strict=True)]

    return SamplerFacts(f"vLLM at {client.base_url}", dtype, keep_other_prompts(client), score)


def keep_other_prompts(client: Any) -> Callable[[list[int]], list[int] | None]:
    """Return what gives the ids that the server says it has read where TRL's client was told to send these; None where
    they are the same.
    """
    generate, others = client.generate, dict[tuple[int, ...], list[int]]()

    def generate_and_keep(prompts: Sequence[list[int]], **named: Any) -> Any:
        answers = generate(prompts=prompts, **named)
        for sent, read in zip(prompts, answers["prompt_ids"], strict=True):
            if list(sent) != list(read) and len(others) < MOST_PROMPTS:
                others[tuple(sent)] = list(read)
        return answers

    client.generate = generate_and_keep
    return lambda ids: others.get(tuple(ids))
