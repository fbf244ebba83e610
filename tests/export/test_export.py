"""An exported folder is self-contained: plain transformers and PEFT load it, and it says nothing of the machine."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from in_process import Finished, Inputs, train
from lively import lively_model
from markdown_it import MarkdownIt
from peft import AutoPeftModelForCausalLM
from processes import HANG_S
from safetensors.torch import load_file
from transformers import AutoTokenizer, GenerationConfig

from sftplay.config.load import load_config
from sftplay.export.adapter_card import write_adapter_card
from sftplay.export.adapter_names import FOR_ENGINES
from sftplay.export.export import Redactor, export, public_run
from sftplay.export.model_card import write_card

SECRET = "hf_abcdefghijklmnopqrst"
"""Too short for the loader, which refuses whole tokens."""
IDS = torch.arange(3, 60)[None]


@pytest.fixture(scope="module")
def run(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A LoRA run below a folder with a space, measured before and after, that was given a secret."""
    home = tmp_path_factory.mktemp("secret place")
    base = Path(shutil.copytree(inputs.model, home / "models" / "my base"))
    lively_model(base).save_pretrained(base)
    (base / "README.md").write_text("---\nlanguage: en\nlicense: mit\n---\nA model.\n")
    (base / "preprocessor_config.json").write_text('{"image_size": 4}')
    return train(
        home, Inputs(base, inputs.train, inputs.held_out), train__max_steps=4,
        eval__before=True, eval__after=True, train__extra={"project": f"mine {SECRET}"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def exported(run: Finished, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(run.cfg, run.folder, out=tmp_path_factory.mktemp("out") / "tuned model", shard_bytes=40_000)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def scores(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def python_blocks(card: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", card, re.DOTALL)


@pytest.mark.slow
def test_code_of_the_card_runs_with_no_kit_and_gives_the_text_of_plain_peft(run: Finished, exported: Path):
    code = python_blocks((exported / "README.md").read_text())[0].replace('"Hello"', '"why old boats"')
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=exported, env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    adapter = run.folder.path / "adapter"
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    prompt = tokenizer.apply_chat_template(
        user("why old boats"),
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    model = AutoPeftModelForCausalLM.from_pretrained(adapter).eval()
    with torch.no_grad():
        out = model.generate(**prompt, max_new_tokens=64, do_sample=False, eos_token_id=2, pad_token_id=0)
    text = tokenizer.decode(out[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert len(set(text)) > 10
    assert done.stdout == text + "\n"


def test_card_has_a_front_matter_the_hub_reads_and_the_runs_figures(run: Finished, exported: Path):
    text = (exported / "README.md").read_text()
    card = ModelCard(text)
    assert card.data.license == "mit"
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "text-generation"
    assert set(card.data.tags) == {"sft-play", "sft", "lora"}
    assert card.data.base_model is None  # a folder of this machine is no name on the hub
    for name in ("before", "after"):
        figures = json.loads((run.folder.eval / f"{name}.json").read_text())
        assert json.loads((exported / "eval" / f"{name}.json").read_text()) == figures
        assert f"{figures['loss']:.4f}" in text
    assert "|  | before | after |" in text  # in the order of time
    report = json.loads((run.folder.path / "data_report.json").read_text())
    assert f"| {report['read']} | {report['kept']} |" in text
    assert f"{report['tokens']:,}" in text
    assert "| transformers | 5." in text
    assert "r 4, alpha 8" in text


HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "[click](javascript:alert(1))",
    "a | b |\n\n# head\n\n| c",
    "`code` ``more`` ```\n<b>bold</b>\n```",
    "&lt;img&gt; &amp; $x$ ~~y~~ **z**",
    "\\`<i>x</i>\\`",
    "right\u202eleft\x07bell",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_no_name_or_version_becomes_more_than_text_in_the_card(name: str, run: Finished, tmp_path: Path):
    public = public_run(run.cfg, run.folder)
    cfg = public.cfg.with_values({"model.name": name, "model.revision": name}, "test")
    manifest = {"kit": name, "git_commit": name, "machine": {"libraries": {name: name}}}
    report = {**public.data_report, "sources": {name: public.data_report, "b": public.data_report}}
    figures = {name: {"loss": 1.0, name: 2.0}}
    hostile = replace(public, name=name, cfg=cfg, licence=name, manifest=manifest, data_report=report, figures=figures)
    write_card(hostile, tmp_path / "README.md")
    write_adapter_card(tmp_path / "adapter.md", name=name, base=name)
    for path, n_tables in ((tmp_path / "README.md", 4), (tmp_path / "adapter.md", 0)):
        card = ModelCard.load(path)
        page = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(card.text)
        tags = set(re.findall(r"<([a-z0-9]+)", page))
        assert tags <= {"h1", "h2", "p", "strong", "code", "pre", "table", "thead", "tbody", "tr", "th", "td"}
        assert (page.count("<h1>"), page.count("<table>")) == (1, n_tables)
        assert page.count("<strong>") <= 2
        shown = " ".join("".join(letter if letter.isprintable() else " " for letter in name).split())
        assert html.escape(shown) in page
        assert not {"\u202e", "\x07"} & set(card.text)


def test_the_card_tells_of_new_tokens_that_an_older_release_found(run: Finished, tmp_path: Path):
    kept = run.folder.path / "new_tokens.json"  # its config names no file of terms
    for is_there in (False, True):
        kept.write_text("{}") if is_there else kept.unlink(missing_ok=True)
        write_card(public_run(run.cfg, run.folder), tmp_path / "README.md")
        assert ("new tokens" in (tmp_path / "README.md").read_text()) == is_there
    kept.unlink()


def test_the_card_shows_figures_and_no_settings_of_a_measurement(run: Finished, tmp_path: Path):
    public = public_run(run.cfg, run.folder)
    of_tasks = {"run": {"arc": {"acc": {"value": 0.5}}}, "template": True, "batch_size": 8, "step": 4, "limit": None}
    of_sources = {"window": 64, "perplexity_compares": True, "sources": {}}
    figures = {**public.figures, "lm-eval": of_tasks, "quick-perplexity": of_sources}
    write_card(replace(public, figures=figures, step=3), tmp_path / "README.md")
    text = (tmp_path / "README.md").read_text()
    assert "|  | before | after |\n" in text
    assert not any(f"| {name} |" in text for name in ("template", "batch_size", "step", "window"))
    assert "| steps | 3 of 4 |" in text


def test_the_card_opens_the_base_at_the_commit_that_was_trained_on(run: Finished, tmp_path: Path):
    public = public_run(run.cfg, run.folder)
    cfg = public.cfg.with_values({"model.name": "org/tiny", "model.revision": "c0ffee"}, "test")
    write_card(replace(public, cfg=cfg, hub_base="org/tiny"), tmp_path / "README.md")
    opened = python_blocks((tmp_path / "README.md").read_text())[1]
    assert "base = AutoModelForCausalLM.from_pretrained('org/tiny', revision='c0ffee')" in opened


def test_the_card_names_the_adapter_for_vllm_where_there_is_one(run: Finished, tmp_path: Path):
    for is_there in (False, True):
        if is_there:
            (tmp_path / FOR_ENGINES).mkdir()
        write_card(public_run(run.cfg, run.folder), tmp_path / "README.md")
        assert (f"`{FOR_ENGINES}`" in (tmp_path / "README.md").read_text()) == is_there


def test_weights_can_be_read_by_whom_the_umask_lets_read(run: Finished, exported: Path, tmp_path: Path):
    (tmp_path / "new").touch()
    expected = stat.S_IMODE((tmp_path / "new").stat().st_mode)
    for folder in (exported, run.folder.path / "adapter", run.folder.checkpoints):
        modes = {path: stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*") if path.is_file()}
        assert modes == dict.fromkeys(modes, expected)
        assert any(path.suffix == ".safetensors" for path in modes)


def test_the_card_of_a_runs_adapter_names_no_place_of_this_machine(run: Finished):
    text = (run.folder.path / "adapter" / "README.md").read_text()
    assert "secret place" not in text
    assert "More Information Needed" not in text
    assert ModelCard(text).data.library_name == "peft"


def test_nothing_in_it_names_a_place_of_this_machine_or_a_secret(run: Finished, exported: Path):
    files = [path for path in exported.rglob("*") if path.is_file()]
    names = {path.relative_to(exported).as_posix() for path in files}
    assert {"README.md", "config.resolved.yaml", "data_report.json", "eval/after.json", "chat_template.jinja"} <= names
    assert not any(name.endswith(".jsonl") for name in names)  # rows of the data
    home = run.folder.path.parents[1]
    banned = [
        SECRET,
        "secret place",
        str(home),
        str(Path.home()) + "/",
        "/tmp/",
        str(Path.cwd()),
        run.cfg.data.train_path,
    ]
    leaks = [(path.name, word) for path in files for word in banned if word.encode() in path.read_bytes()]
    assert leaks == []
    # The originals do hold them, or this would show nothing.
    assert SECRET in run.folder.resolved.read_text()
    assert "secret place" in run.folder.resolved.read_text()
    assert "secret place" in (run.folder.path / "adapter" / "adapter_config.json").read_text()


def test_files_of_run_and_base_go_along_but_for_places_and_secrets(run: Finished, exported: Path):
    read = load_config(exported / "config.resolved.yaml")
    assert read.train.model_dump() == run.cfg.train.model_dump() | {"extra": {"project": "mine (removed)"}}
    assert read.tuning == run.cfg.tuning
    assert (read.model.name, read.data.train_path) == ("my base", Path(run.cfg.data.train_path).name)
    assert GenerationConfig.from_pretrained(exported).eos_token_id == 2
    assert json.loads((exported / "preprocessor_config.json").read_text()) == {"image_size": 4}


def test_full_run_is_exported_in_its_own_precision_with_an_unknown_licence_said(inputs: Inputs, tmp_path: Path):
    base = Path(shutil.copytree(inputs.model, tmp_path / "base"))
    GenerationConfig(eos_token_id=5).save_pretrained(base)  # while its chats end with token 2
    started = Inputs(base, inputs.train, inputs.held_out)
    run = train(tmp_path, started, tuning__mode="full", train__precision="bf16", train__max_steps=2)
    out = export(run.cfg, run.folder, out=tmp_path / "out")
    for folder in (run.folder.path / "model", out):
        assert GenerationConfig.from_pretrained(folder).eos_token_id == [2, 5]
    weights = load_file(out / "model.safetensors")
    saved = load_file(run.folder.path / "model" / "model.safetensors")
    assert {name: value.dtype for name, value in weights.items()} == dict.fromkeys(saved, torch.bfloat16)
    assert all(torch.equal(weights[name], value) for name, value in saved.items())
    text = (out / "README.md").read_text()
    assert ModelCard(text).data.license == "unknown"
    assert "Licence.** Not known" in text
    assert "Not measured." in text
    assert (run.folder.eval / "step-2.json").is_file()  # of weights on the way
    assert not (out / "eval").exists()
    assert len(python_blocks(text)) == 1
    assert not (out / "adapter").exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/home/ann/my data/rows.jsonl", "rows.jsonl"),
        ("see /home/ann/rows.jsonl:7, then ~/b/c.json", "see rows.jsonl:7, then c.json"),
        ("see /data of ann/rows.jsonl: bad", "see rows.jsonl: bad"),
        ("https://host.org/a/b/c and org/model and ../up/x and </think>", None),
        ("https://ann:pw@host.org/a", "https://(removed)@host.org/a"),
        (f"token {SECRET}!", "token (removed)!"),
        ("1/2/3 and/or/not", None),
    ],
)
def test_places_are_cut_to_their_last_part_and_the_rest_stays(text: str, expected: str | None):
    clean = Redactor(["/data of ann/rows.jsonl", "sft", "/"])
    assert clean({"a": [text]}) == {"a": [text if expected is None else expected]}


def test_values_of_keys_that_name_a_secret_are_gone():
    given = {"hub_token": "x", "api_key": "y", "eos_token": "</s>", "max_new_tokens": 4, "inner": {"password": "z"}}
    removed = "(removed)"
    expected = {
        "hub_token": removed,
        "api_key": removed,
        "eos_token": "</s>",
        "max_new_tokens": 4,
        "inner": {"password": removed},
    }
    assert Redactor()(given) == expected
