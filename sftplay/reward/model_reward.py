"""The reward `model`: a trained score for answers, opened by plain transformers in the reward's own process."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from sftplay.atomic import read_object
from sftplay.config.data import DataConfig
from sftplay.config.layers import RESOLVED
from sftplay.data.layouts import LayoutOptions, read_layout_options
from sftplay.data.prompts import to_prompt
from sftplay.data.records import Chat, Message, Source, Text
from sftplay.errors import ConfigError, DataError, ran_out_of_memory
from sftplay.reward.table import RewardValues

BATCH_TOKENS = {"cpu": 4_096, "cuda": 32_768}
"""Tokens that are scored at a time, padding included. Fewer where memory does not suffice."""

TRAIN = "train one with task_mode: reward_model, and name its run or the folder of its result"


def find_score_model(path: str, output_dir: str) -> Path:
    """Return the folder of the score model that `path` means: a run, by its folder or its name, or a model's folder.

    Raises:
        ConfigError: there is none, or it gives no single score.
    """
    named = [Path(path), Path(output_dir) / path]
    folder = next((found for found in named if found.is_dir()), None)
    if folder is None:
        raise ConfigError(f"there is neither a folder nor a run {path!r}", fix=TRAIN)
    if (folder / RESOLVED).is_file():
        results = [folder / name for name in ("adapter", "model") if (folder / name).is_dir()]
        if not results:
            raise ConfigError(f"the run {folder} has no result yet", fix="let it end, or finish it: `make resume`")
        folder = results[0]
    if (folder / "adapter_config.json").is_file():
        is_score, what = _read(folder, "adapter_config.json").get("task_type") == "SEQ_CLS", "an adapter"
    elif (folder / "config.json").is_file():
        config = _read(folder, "config.json")
        classes, labels = config.get("architectures") or ["a model"], config.get("id2label") or ()
        what = str(classes[0])
        is_score = what.endswith("ForSequenceClassification") and len(labels) == 1
        what += f" with {len(labels)} labels" if labels and not is_score else ""
    else:
        raise ConfigError(f"{folder} has neither config.json nor adapter_config.json", fix=TRAIN)
    if not is_score:
        raise ConfigError(f"{folder} holds {what}, which gives no score", fix=TRAIN)
    if not (folder / "tokenizer_config.json").is_file():
        raise ConfigError(f"{folder} has no tokenizer", fix="copy the tokenizer's files there, chat template included")
    return folder


def _read(folder: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / name} cannot be read ({error})", fix="copy the model again") from None
    return content if isinstance(content, dict) else {}


def open_score_model(folder: Path) -> tuple[Any, Any]:
    """Return the score model in `folder` and its tokenizer, by plain transformers and PEFT, on this process's GPU.

    On a CPU it computes in fp32. Its pad token is the tokenizer's.

    Raises:
        ConfigError: the files cannot be opened.
    """
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from sftplay import log

    log.quiet_libraries()
    has_gpu = torch.cuda.is_available()
    options: dict[str, Any] = {"dtype": "auto" if has_gpu else torch.float32, "num_labels": 1, "use_safetensors": True}
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder))
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        options["pad_token_id"] = tokenizer.pad_token_id
        if (folder / "adapter_config.json").is_file():
            from peft import PeftModel

            kept, named = folder.parent / "base", _read(folder, "adapter_config.json")
            base = str(kept if kept.is_dir() else named["base_model_name_or_path"])  # a run may have been moved
            commit = read_object(folder.parent / "manifest.json").get("base_commit")  # of a run on the hub's model
            revision = None if kept.is_dir() else commit or named.get("revision")
            with quiet_transformers():  # the head is the adapter's
                bare = AutoModelForSequenceClassification.from_pretrained(base, revision=revision, **options)
            model: Any = PeftModel.from_pretrained(bare, str(folder))
        else:
            model = AutoModelForSequenceClassification.from_pretrained(str(folder), **options)
    except Exception as error:
        said = str(error).splitlines()[0][:300] if str(error) else ""
        what = f"the reward model cannot be opened ({type(error).__name__}: {said})"
        raise ConfigError(what, where=str(folder), fix="copy its files again, or train it again") from error
    if has_gpu:
        model.to(f"cuda:{log.local_rank()}")
    return model.eval(), tokenizer


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Within it transformers prints errors alone: not that weights are missing which come from elsewhere."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


class Scorer:
    """Scores completions of rows with one model."""

    def __init__(self, model: Any, tokenizer: Any, *, reading: LayoutOptions, max_tokens: int | None) -> None:
        """`max_tokens` is the most that a prompt and its completion may have together; None: what the model takes."""
        from sftplay.data.render.render import Renderer

        self.model, self.tokenizer, self.reading = model, tokenizer, reading
        self.renderer = Renderer.prove(tokenizer, tokenizer.chat_template, samples=[])
        self.max_tokens = max_tokens or getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.batch_tokens = BATCH_TOKENS[model.device.type]

    def __call__(self, completions: Sequence[Any], **columns: Any) -> RewardValues:
        """Return the score of each completion; None, with the reason, where the row has no question, the chat template
        refuses it, or it is longer than the model takes.
        """
        scored, texts = RewardValues([None] * len(completions)), dict[int, list[int]]()
        for n, completion in enumerate(completions):
            try:
                texts[n] = self.render({name: values[n] for name, values in columns.items()}, str(completion))
                if self.max_tokens is not None and len(texts[n]) > self.max_tokens:
                    raise DataError(f"{len(texts.pop(n)):,} tokens are more than the {self.max_tokens:,} it may have")
            except DataError as error:
                scored.reasons.append(error.what)
        for n, value in zip(texts, self.score_rows(list(texts.values())), strict=True):
            scored.values[n] = value if isfinite(value) else None
            scored.reasons.extend([] if isfinite(value) else [f"its score is {value}"])
        return RewardValues(scored.values, list(dict.fromkeys(scored.reasons)))

    def render(self, row: dict[str, Any], completion: str) -> list[int]:
        """Return the tokens of a row's question with the completion as its answer, as in training."""
        known = {name: value for name, value in row.items() if value is not None}
        source = Source("the row", 1)
        prompt = to_prompt(known, source, number=0, reading=self.reading)
        if prompt.beginning:
            (found,) = self.renderer.render([Text(prompt.beginning + completion, source)])
        else:
            chat = Chat(
                (*prompt.messages, Message("assistant", completion)), source, len(prompt.messages), tools=prompt.tools
            )
            found = self.renderer.render([chat])[-1]
        if found.problem:
            raise DataError(found.problem, where="the reward model's chat template")
        return found.input_ids

    def score_rows(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Return the score of each row of token ids, in their order; rows are padded on the right. Where memory does
        not suffice, this batch and all later ones are smaller.
        """
        import torch

        order = sorted(range(len(rows)), key=lambda n: -len(rows[n]))
        scores, at = [0.0] * len(rows), 0
        while at < len(order):
            width = len(rows[order[at]])
            taken = order[at : at + max(1, self.batch_tokens // width)]
            ids = torch.full((len(taken), width), self.tokenizer.pad_token_id)
            mask = torch.zeros_like(ids)
            for line, n in enumerate(taken):
                ids[line, : len(rows[n])] = torch.tensor(rows[n])
                mask[line, : len(rows[n])] = 1
            try:
                with torch.no_grad():
                    found = self.model(
                        input_ids=ids.to(self.model.device), attention_mask=mask.to(self.model.device)
                    ).logits
            except RuntimeError as error:
                if len(taken) == 1 or not ran_out_of_memory(error):
                    raise
                self.batch_tokens = width * (len(taken) // 2)
                continue
            for n, score in zip(taken, found[:, 0].float().tolist(), strict=True):
                scores[n] = score
            at += len(taken)
        return scores


def open_scorer(
    *, path: str, data: DataConfig, output_dir: str, max_tokens: Annotated[int, Field(ge=1)] | None = None
) -> Scorer:
    """Return the function that scores completions; `data` says how the rows of prompts are read.

    Raises:
        ConfigError: there is no such model, or it cannot be opened.
        DataError: its chat template is refused.
    """
    model, tokenizer = open_score_model(find_score_model(path, output_dir))
    return Scorer(model, tokenizer, reading=read_layout_options(data), max_tokens=max_tokens)
