"""Delivery: a run's merged and exported model answers in plain transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sftplay.runs.gpu_check.check import Broken, Check, CheckContext, call, undisturbed


def merge_and_export(context: CheckContext) -> str:
    """Both folders open in plain transformers and write the same answer."""
    run = undisturbed(context)
    folders = {verb: context.folder / verb for verb in ("merge", "export")}
    for verb, folder in folders.items():
        call(verb, run, "--run", str(run.folder.path), "--out", str(folder))
    question = json.loads((context.shared / "rows.jsonl").read_text(encoding="utf-8").splitlines()[0])["messages"][:1]
    answers = {verb: answer(folder, question, has_gpu=context.has_gpu) for verb, folder in folders.items()}
    context.details["answers"] = answers
    if len(set(answers.values())) != 1 or not answers["export"].strip():
        raise Broken(f"the answers differ or are empty: {answers}")
    return f"merged and exported model write the same {len(answers['export'])} characters"


def answer(folder: Path, question: list[dict[str, str]], *, has_gpu: bool) -> str:
    """Return what the model in `folder` writes, greedily, opened as a stranger would open it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder).to("cuda" if has_gpu else "cpu")
    words = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    words = words.to(model.device)
    written = model.generate(**words, max_new_tokens=12, do_sample=False)
    return str(tokenizer.decode(written[0, words["input_ids"].shape[1] :], skip_special_tokens=True))


CHECKS = (Check(name="delivery: merge, export, plain transformers", run=merge_and_export),)
