"""`lm-eval`: the figures of the harness called by hand, adapter and template in effect, programs in the box."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from in_process import Finished, Inputs, train
from lively import lively_model
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from small_run import WORDS
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from sftplay import cli
from sftplay.config.data import SandboxConfig
from sftplay.data.render.render import Renderer
from sftplay.errors import MachineError, RunError, SftplayError
from sftplay.places import find_vllm_python
from sftplay.report.figures import format_figure
from sftplay.report.run_files import RunFiles
from sftplay.sandbox import pool
from sftplay.sandbox.pool import SAFE, find_problem

INSTALLED = find_spec("lm_eval") is not None
pytestmark = [
    pytest.mark.usefixtures("verbs_environment"),
    pytest.mark.skipif(not INSTALLED, reason="needs lm-evaluation-harness: make install EXTRAS=harness"),
    pytest.mark.filterwarnings("ignore"),  # the harness and the libraries of its metrics
]
boxed = pytest.mark.skipif(all(map(find_problem, SAFE)), reason="needs bubblewrap or sandlock")

SYSTEM = "seven old boats"
ALL = "pick,say,score"

TASK = """
dataset_path: json
dataset_kwargs: {data_files: ROWS}
test_split: train
fewshot_split: train
doc_to_text: "{{question}}"
metadata: {version: 3.0}
"""
TASKS = {
    "pick": (
        "output_type: multiple_choice\ndoc_to_choice: choices\ndoc_to_target: answer\nmetric_list: [{metric: acc}]\n"
    ),
    "score": "output_type: loglikelihood\ndoc_to_target: '{{choices[answer]}}'\nmetric_list: [{metric: perplexity}]\n",
    "say": (
        "output_type: generate_until\ndoc_to_target: '{{choices[answer]}}'\nnum_fewshot: 2\n"
        "generation_kwargs: {until: [river], max_gen_toks: 12}\n"
        "metric_list: [{metric: chrf}, {metric: exact_match, aggregation: mean, higher_is_better: true}]\n"
    ),
}

needs_vllm = pytest.mark.skipif(find_vllm_python() is None, reason="needs .venv-vllm: make install-vllm")

Figures = dict[str, dict[str, tuple[float, float]]]


@pytest.fixture(scope="module")
def inputs(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """A base with answers that depend on every token, and heads of a width that vLLM computes with on a CPU."""
    base = Path(shutil.copytree(inputs.model, tmp_path_factory.mktemp("base") / "model"))
    config = AutoConfig.from_pretrained(base, head_dim=32)
    AutoModelForCausalLM.from_config(config).save_pretrained(base)
    lively_model(base).save_pretrained(base)
    return replace(inputs, model=base)


@pytest.fixture(scope="module")
def run(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return train(
        tmp_path_factory.mktemp("run"), inputs, train__learning_rate=0.05, train__max_steps=8, data__system=SYSTEM,
        eval__batch_size=8,
    )  # fmt: skip


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three tasks on 12 local rows."""
    folder, draw = tmp_path_factory.mktemp("tasks"), random.Random(5)
    rows = [
        {
            "question": " ".join(draw.choices(WORDS, k=4)),
            "choices": [" ".join(draw.choices(WORDS, k=k)) for k in (1, 2, 3)], "answer": draw.randrange(3),
        }
        for _ in range(12)
    ]  # fmt: skip
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in TASKS.items():
        write_task(folder, name, text, rows=folder / "rows.jsonl")
    return folder


def write_task(folder: Path, name: str, text: str, *, rows: Path) -> None:
    (folder / f"{name}.yaml").write_text(f"task: {name}\n{text}" + TASK.replace("ROWS", str(rows)))


def ask(run: Path, tasks: Path, names: str, *words: str, code: int = 0) -> Any:
    """Call the verb as a user does, and check its exit code."""
    words = ("--run", str(run), "--tasks", names, "--include-path", str(tasks), *words)
    assert cli.main(["lm-eval", *words]) == code


@pytest.fixture(scope="module")
def measured(run: Finished, tasks: Path) -> dict[str, Any]:
    """The content of lm-eval.json of all three tasks."""
    ask(run.folder.path, tasks, ALL, "--json")
    content: dict[str, Any] = json.loads((run.folder.eval / "lm-eval.json").read_text())
    return content


def answers(run: Finished) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.folder.eval / "lm-eval.jsonl").read_text().splitlines()]


def by_hand(run: Finished, tasks: Path, model: Any, *, is_chat: bool) -> Figures:
    """The harness as its manual says, on a model that plain libraries have opened."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    tokenizer = AutoTokenizer.from_pretrained(run.folder.result)
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    with patch("lm_eval.evaluator.add_env_info"):  # asks ten programs for this machine's versions
        found = simple_evaluate(
            HFLM(pretrained=model, tokenizer=tokenizer, batch_size=8), tasks=ALL.split(","), task_manager=manager,
            apply_chat_template=is_chat, fewshot_as_multiturn=is_chat, system_instruction=SYSTEM if is_chat else None,
        )  # fmt: skip
    return {
        task: {key.partition(",")[0]: value for key, value in row.items() if key.endswith(",none")}
        for task, row in found["results"].items()
    }


def figures_of(content: dict[str, Any], side: str) -> dict[str, dict[str, Any]]:
    """One side of lm-eval.json as the harness writes figures."""
    return {
        task: {
            **{name: cell["value"] for name, cell in metrics.items()},
            **{f"{name}_stderr": cell["stderr"] for name, cell in metrics.items()},
        }
        for task, metrics in content[side].items()
    }


@pytest.mark.slow
@pytest.mark.contract
def test_run_and_base_have_the_figures_of_the_harness_called_by_hand_and_controls_differ(
    run: Finished, tasks: Path, measured: dict[str, Any], inputs: Inputs
):
    tuned = AutoPeftModelForCausalLM.from_pretrained(run.folder.result)
    with_adapter = by_hand(run, tasks, tuned, is_chat=True)
    without_template = by_hand(run, tasks, tuned, is_chat=False)
    without_adapter = by_hand(run, tasks, AutoModelForCausalLM.from_pretrained(inputs.model), is_chat=True)
    for side, expected in (("run", with_adapter), ("base", without_adapter)):
        found = figures_of(measured, side)
        assert found.keys() == expected.keys() == {"pick", "say", "score"}
        for task, row in expected.items():
            assert found[task] == pytest.approx(row, rel=1e-6, abs=1e-9), (side, task)
    for control in (without_adapter, without_template):
        assert control["score"]["perplexity"] != pytest.approx(with_adapter["score"]["perplexity"], rel=0.01)
        assert control["say"]["chrf"] != pytest.approx(with_adapter["say"]["chrf"], rel=0.01)


@pytest.mark.slow
@pytest.mark.contract
@needs_vllm
def test_real_vllm_gives_the_figures_and_answers_of_transformers_for_run_and_base(
    run: Finished, tasks: Path, measured: dict[str, Any], tmp_path: Path
):
    folder = Path(shutil.copytree(run.folder.path, tmp_path / "run"))  # others read what transformers has measured
    expected = answers(run)
    ask(folder, tasks, ALL, "--engine", "vllm", "--json")
    found = json.loads((folder / "eval/lm-eval.json").read_text())
    lines = [json.loads(line) for line in (folder / "eval/lm-eval.jsonl").read_text().splitlines()]
    assert found["engine"] == "vllm"
    assert found["base_by"] == "served before"
    for side in ("run", "base"):
        for task, row in figures_of(measured, side).items():
            assert figures_of(found, side)[task] == pytest.approx(row, rel=1e-4, abs=1e-6), (side, task)
    assert found["max_length"] == measured["max_length"] - 2
    assert [found[key] for key in ("prompts", "tasks")] == [measured[key] for key in ("prompts", "tasks")]
    for line, wanted in zip(lines, expected, strict=True):
        same = ("side", "task", "row", "prompt", "target", *(["answers"] if line["task"] == "say" else []))
        assert [line[key] for key in same] == [wanted[key] for key in same]


@pytest.mark.slow
@pytest.mark.contract
def test_the_file_says_what_was_asked_and_how(run: Finished, measured: dict[str, Any]):
    from lm_eval import __version__

    assert measured["tasks"]["say"] == {"version": 3.0, "n": 12, "rows": 12, "fewshot": 2}
    asked = [measured[key] for key in ("harness", "engine", "template", "system", "limit", "batch_size", "base_by")]
    assert asked == [__version__, "transformers", True, SYSTEM, None, 8, "adapter switched off"]
    assert measured["seeds"] == {"random": 0, "numpy": 1234, "torch": 1234, "fewshot": 1234}
    prompts = {side: [line["prompt"] for line in answers(run) if line["side"] == side] for side in ("run", "base")}
    assert prompts["run"] == prompts["base"]
    few = next(line["prompt"] for line in answers(run) if line["task"] == "say")
    assert few.startswith(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n")
    assert few.count("<|im_start|>assistant\n") == 3  # two examples as turns of their own, and the answer's opening
    page = (run.folder.path / "report.html").read_text()
    assert "lm-evaluation-harness" in page
    assert format_figure("", measured["run"]["score"]["perplexity"]["value"]) in page


@pytest.mark.slow
def test_a_run_that_learned_documents_is_asked_with_plain_ones_and_so_is_any_by_wish(
    run: Finished, tasks: Path, inputs: Inputs, tmp_path: Path
):
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": " ".join(WORDS[n % 9 :])}) + "\n" for n in range(40)))
    documents = train(
        tmp_path / "cpt", inputs, task_mode="cpt", data__train_path=str(texts), data__val_path=None, data__split=0.1,
        cpt__block_size=32, train__learning_rate=0.05,
    )  # fmt: skip
    shutil.copytree(run.folder.path, tmp_path / "chat")
    for folder, words in ((documents.folder.path, ()), (tmp_path / "chat", ("--no-template",))):
        ask(folder, tasks, "score", "--limit", "2", "--num-fewshot", "1", *words)
        content = json.loads((folder / "eval" / "lm-eval.json").read_text())
        assert (content["template"], content["system"], content["limit"]) == (False, None, 2)
        assert content["tasks"]["score"] == {"version": 3.0, "n": 2, "rows": 12, "fewshot": 1}
        lines = (folder / "eval" / "lm-eval.jsonl").read_text()
        assert lines.count('"side": "run"') == 2
        assert "<|im_start|>" not in lines


@pytest.mark.slow
def test_a_model_trained_in_full_is_measured_against_its_base_opened_again(
    tasks: Path, inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    full = train(tmp_path, inputs, tuning__mode="full", train__learning_rate=0.01)
    ask(full.folder.path, tasks, "score")
    content = json.loads((full.folder.eval / "lm-eval.json").read_text())
    value = content["base"]["score"]["perplexity"]["value"]
    assert (content["base_by"], content["weights"]) == ("opened again", "model")
    assert content["run"]["score"]["perplexity"]["value"] < 0.9 * value
    shutil.copy(inputs.model / "model.safetensors", full.folder.result / "model.safetensors")
    ask(full.folder.path, tasks, "score", code=5)
    assert f"the model {full.folder.result}: changes no score of the first prompt" in capsys.readouterr().err


def test_an_adapter_without_effect_ends_with_5_before_anything_is_measured(
    run: Finished, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "run"
    shutil.copytree(run.folder.path, folder, ignore=shutil.ignore_patterns("eval", "checkpoints"))
    weights = folder / "adapter" / "adapter_model.safetensors"
    zeros = {name: torch.zeros_like(t) if "lora_B" in name else t for name, t in load_file(weights).items()}
    save_file(zeros, weights, metadata={"format": "pt"})
    ask(folder, tasks, "score", code=5)
    assert f"the adapter {folder / 'adapter'}: changes no score of the first prompt" in capsys.readouterr().err
    assert not (folder / "eval" / "lm-eval.json").exists()


# What reaches the model


@pytest.fixture
def open_model(inputs: Inputs, run: Finished) -> Callable[..., Any]:
    """A HarnessModel of the base; `learned` is the template that the run was trained with, else the tokenizer's."""
    from sftplay.evaluate.harness import HarnessModel

    model, tokenizer = (kind.from_pretrained(inputs.model) for kind in (AutoModelForCausalLM, AutoTokenizer))

    def open_it(*, shown: str | None = None, learned: str | None = None, bos: bool = False, eos: int = 2) -> Any:
        model.generation_config.eos_token_id = eos
        if bos:
            tokenizer.add_special_tokens({"bos_token": "<pad>"})
            tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<pad> $A", None, [("<pad>", 0)])
        tokenizer.chat_template = shown or tokenizer.chat_template
        renderer = Renderer.prove(tokenizer, learned or tokenizer.chat_template, samples=[])
        return HarnessModel(model, tokenizer, renderer, cfg=run.cfg)

    return open_it


CHAT = [{"role": "system", "content": "be old"}, {"role": "user", "content": "why"}]


def test_a_prompt_by_another_template_than_the_runs_is_refused(open_model: Callable[..., Any]):
    opened = open_model()
    assert opened.apply_chat_template(CHAT).endswith("<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\n")
    begun = opened.apply_chat_template([*CHAT, {"role": "assistant", "content": "def f"}], add_generation_prompt=False)
    assert begun.endswith("<|im_start|>assistant\ndef f")
    other = opened.tokenizer.chat_template.replace("<|im_start|>", "<|im_start|>the ")
    with pytest.raises(RunError, match="the run was trained to be asked"):
        open_model(learned=other).apply_chat_template(CHAT)


@pytest.mark.parametrize("bos", ["{{ bos_token }}", ""])
def test_a_prompt_has_the_bos_that_the_template_writes_and_no_other(bos: str, open_model: Callable[..., Any]):
    opened = open_model(shown=bos + open_model().tokenizer.chat_template, bos=True)
    text = opened.apply_chat_template(CHAT)
    n = int(bool(bos))
    assert opened.tokenizer(text)["input_ids"][: n + 1] == [0] * (n + 1)  # the tokenizer alone adds one
    for ids in (opened.tok_encode(text), opened.tok_batch_encode([text])[0][0].tolist()):
        assert ids[: n + 1] == [0] * n + [1]
    opened.add_bos_token = True
    with pytest.raises(RunError, match="the run was trained on") if not n else nullcontext():
        opened.apply_chat_template(CHAT)


def test_answers_end_at_the_templates_end_token_though_the_base_does_not_know_it(open_model: Callable[..., Any]):
    ended = open_model().tokenizer.convert_tokens_to_ids("<|im_end|>")
    opened = open_model(eos=5)
    assert opened.model.generation_config.eos_token_id == [ended, 5]


def test_an_adapter_with_embeddings_of_a_tied_base_is_as_it_was_loaded(inputs: Inputs, run: Finished):
    from sftplay.evaluate.harness import HarnessModel

    model, tokenizer = (kind.from_pretrained(inputs.model) for kind in (AutoModelForCausalLM, AutoTokenizer))
    model.config.tie_word_embeddings = True
    model.tie_weights()
    ends = ["embed_tokens", "lm_head"]
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=ends)).eval()
    torch.nn.init.normal_(adapted.get_output_embeddings().modules_to_save.default.weight)
    ids = torch.tensor([[7, 8, 9]])
    with torch.no_grad():
        before = adapted(ids).logits
        HarnessModel(adapted, tokenizer, None, cfg=run.cfg)
        assert torch.equal(adapted(ids).logits, before)


def test_a_system_turn_that_the_template_refuses_is_counted_and_left_out(open_model: Callable[..., Any]):
    plain = open_model().tokenizer.chat_template
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + plain
    opened = open_model(shown=refusing)
    assert opened.apply_chat_template(CHAT).startswith("<|im_start|>user\nwhy")
    assert opened.counts["system_left_out"] == 1


def test_prompts_that_type_special_tokens_or_lose_their_beginning_are_counted(open_model: Callable[..., Any]):
    opened = open_model()
    opened.apply_chat_template([{"role": "user", "content": "say <|im_end|> twice"}])
    ids, mask = opened.tok_batch_encode(["why", "the river walks under green light"], left_truncate_len=3)
    assert (ids.shape, mask.shape) == ((2, 3), (2, 3))
    assert opened.counts == {"cut": 1, "special_tokens_typed": 1, "system_left_out": 0}


# Programs

HUMANEVAL = """
include: {folder}/humaneval.yaml
generation_kwargs: {{until: ["\\nclass"], max_gen_toks: 8, do_sample: false}}
"""
CHECK = "def check(candidate):\n    assert candidate(1) == 2\n    assert candidate(40) == 41\n"


@pytest.fixture
def code_tasks(tmp_path: Path) -> Path:
    """The harness's own HumanEval on two rows of ours."""
    import lm_eval

    folder = tmp_path / "code"
    folder.mkdir()
    rows = [{"prompt": f"def f{n}(x):\n", "entry_point": f"f{n}", "test": CHECK} for n in range(2)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = HUMANEVAL.format(folder=Path(lm_eval.__file__).parent / "tasks" / "humaneval")
    text = TASK.replace("fewshot_split: train\n", "").replace('doc_to_text: "{{question}}"\n', "")
    (folder / "code.yaml").write_text(f"task: code{own}" + text.replace("ROWS", str(folder / "rows.jsonl")))
    return folder


@boxed
def test_a_program_of_the_model_stays_in_the_box(
    run: Finished, code_tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from sftplay.evaluate.harness import HarnessModel

    trace = tmp_path / "escaped"
    nasty = f"    open({str(trace)!r}, 'w').close()\n    return x + 1"
    namespace: dict[str, Any] = {}
    exec(f"def f(x):\n{nasty}", namespace)
    assert namespace["f"](1) == 2
    assert trace.exists()  # without a box it does what it wants
    trace.unlink()
    said = iter([["    return x + 1", nasty], ["    return x", "    return (x"]])
    monkeypatch.setattr(HarnessModel, "generate_until", lambda *_, **__: next(said))
    ask(run.folder.path, code_tasks, "code")
    content = json.loads((run.folder.eval / "lm-eval.json").read_text())
    assert not trace.exists()
    assert content["programs"] == {"run": {"ok": 1, "runtime": 1}, "base": {"syntax": 1, "wrong": 1}}
    assert content["run"]["code"]["pass@1,create_test"]["value"] == 0.5
    assert content["base"]["code"]["pass@1,create_test"]["value"] == 0
    assert content["executor"].split()[0] in SAFE


def test_without_a_box_code_tasks_are_refused(
    run: Finished, code_tasks: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def none_holds(*_: Any, **__: Any) -> None:
        raise MachineError("nothing here can box a program", where="sandbox")

    monkeypatch.setattr(pool, "choose_executor", none_holds)
    ask(run.folder.path, code_tasks, "code", code=3)
    assert "nothing here can box a program" in capsys.readouterr().err


REFUSED = {
    "unmarked": (
        "def judge(doc, results):\n    exec(results[0])\n    return {'acc': 1}\n", "",
        "line 2, uses exec, perhaps for what the model wrote",
    ),
    "marked": (
        "def judge(doc, results):\n    return {'acc': 1}\n", "unsafe_code: true\n",
        "marked as unsafe, and runs answers by other means",
    ),
    "under another name": (
        "from subprocess import run as f\ndef judge(doc, results):\n    f(results)\n    return {'acc': 1}\n", "",
        "line 1, imports subprocess.run, perhaps for what the model wrote",
    ),
    "by a task of the harness": (  # sympy reads a formula by eval
        "from lm_eval.tasks.score.math.math_grader import math_equal\n"
        "def judge(doc, results):\n    return {'acc': math_equal(results[0], '1')}\n", "",
        "imports sympy.parsing.sympy_parser.parse_expr, perhaps for what the model wrote",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_a_task_that_runs_answers_by_itself_is_refused(
    kind: str, run: Finished, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    code, mark, said = REFUSED[kind]
    (tmp_path / "own.py").write_text(code)
    metrics = "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
    text = f"output_type: generate_until\nprocess_results: !function own.judge\n{metrics}{mark}doc_to_target: answer\n"
    write_task(tmp_path, "own", text, rows=tasks / "rows.jsonl")
    ask(run.folder.path, tmp_path, "own", code=3)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", ["code_eval", "evaluate-metric/code_eval", "metrics/code_eval/code_eval.py"])
def test_the_metric_that_runs_programs_is_the_stand_in_by_each_of_its_names(name: str):
    import evaluate

    from sftplay.evaluate.boxed_code import boxed_code_eval

    with boxed_code_eval(SandboxConfig()) as stand_in:
        assert evaluate.load(name) is stand_in


def test_pass_at_k_is_that_of_the_paper_and_an_executor_without_a_box_is_refused(monkeypatch: pytest.MonkeyPatch):
    from sftplay.evaluate.boxed_code import BoxedCodeEval

    verdicts = iter(["ok", "wrong", "runtime"])

    class Box:
        def run(self, jobs: list[Any]) -> list[Any]:
            return [SimpleNamespace(status=next(verdicts)) for _ in jobs]

    stand_in = BoxedCodeEval(SandboxConfig())
    stand_in._sandbox = Box()  # type: ignore[assignment]
    figures, details = stand_in.compute(references=["assert f()"], predictions=[["a", "b", "c"]], k=[1, 2, 5])
    assert figures == pytest.approx({"pass@1": 1 / 3, "pass@2": 1 - 1 / 3})  # 1 - C(2, k) / C(3, k)
    assert [row["result"] for _, row in details[0]] == ["ok", "wrong", "runtime"]
    with pytest.raises(SftplayError, match="not run without a box"):
        BoxedCodeEval(SandboxConfig(executor="none"))


@pytest.mark.contract
def test_what_a_tasks_own_python_prints_leaves_standard_output_one_document(
    run: Finished, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "own.py").write_text(
        "print('at import')\ndef judge(doc, results):\n    print('in judge')\n    return {'acc': 1}\n"
    )
    metrics = "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
    text = f"output_type: generate_until\nprocess_results: !function own.judge\n{metrics}doc_to_target: answer\n"
    write_task(tmp_path, "own", text + "generation_kwargs: {max_gen_toks: 2}\n", rows=tasks / "rows.jsonl")
    ask(run.folder.path, tmp_path, "own", "--json", "--limit", "1")
    said = capsys.readouterr()
    assert json.loads(said.out)["run"]["own"]["acc"]["value"] == 1
    assert "at import" in said.err
    assert "in judge" in said.err


def test_a_first_text_without_a_word_is_no_failure(run: Finished, tasks: Path, tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text('{"question": ""}\n{"question": "old boats"}\n')
    metrics = "metric_list: [{metric: bits_per_byte}]\n"
    text = f"output_type: loglikelihood_rolling\ndoc_to_target: '{{{{question}}}}'\n{metrics}"
    write_task(tmp_path, "texts", text, rows=tmp_path / "rows.jsonl")
    ask(run.folder.path, tmp_path, "texts", "--no-template")
    content = json.loads((run.folder.eval / "lm-eval.json").read_text())
    assert content["tasks"]["texts"]["n"] == 2
    assert content["run"]["texts"]["bits_per_byte"]["value"] != content["base"]["texts"]["bits_per_byte"]["value"]


def test_the_length_of_answers_is_read_by_each_of_its_names(open_model: Callable[..., Any]):
    opened = open_model()
    for name in ("max_gen_toks", "max_new_tokens", "max_tokens"):
        request = SimpleNamespace(args=("the river", {name: 10**6}))
        with pytest.raises(SftplayError, match="a task wants answers of 1,000,000 tokens"):
            opened.generate_until([request])


# Refusals


@pytest.mark.contract
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tasks", "pick"], "no run is named"),
        (["--run", "/nowhere", "--tasks", "pick"], "no run '/nowhere'"),
        (["--run", "/nowhere"], "no task is named"),
        (["--run", "/nowhere", "--tasks", "pick", "--include-path", "/nowhere"], "/nowhere: is no folder"),
    ],
)
def test_what_cannot_be_is_refused_before_libraries_are_imported(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("sftplay.commands.harness.prepare_environment", lambda *_, **__: pytest.fail("imports"))
    assert cli.main(["lm-eval", *words]) == 2
    assert said in capsys.readouterr().err


def test_without_vllm_the_install_command_is_named(
    run: Finished, tasks: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("sftplay.commands.harness.find_vllm_python", lambda: None)
    ask(run.folder.path, tasks, "pick", "--engine", "vllm", code=3)
    assert "make install-vllm" in capsys.readouterr().err


def test_without_the_harness_the_install_command_is_named(
    run: Finished, tasks: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("sftplay.commands.harness.find_spec", lambda name: None)
    ask(run.folder.path, tasks, "pick", code=3)
    assert "make install EXTRAS=harness" in capsys.readouterr().err


@pytest.fixture
def few_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the harness's own tasks takes seconds: only those of the include path are known."""
    from lm_eval.tasks import _index

    build = _index.TaskIndex.build
    monkeypatch.setattr(_index.TaskIndex, "build", staticmethod(lambda paths: build(paths[-1:])))


@pytest.mark.contract
def test_an_unknown_task_is_answered_with_the_nearest_and_one_that_is_named_twice_is_refused(
    run: Finished, tasks: Path, tmp_path: Path, few_tasks: None, capsys: pytest.CaptureFixture[str]
):
    ask(run.folder.path, tasks, "scores", "--json", code=2)
    assert json.loads(capsys.readouterr().out)["error"]["nearest"] == ["score"]
    write_task(tmp_path, "same", TASKS["score"], rows=tasks / "rows.jsonl")
    (tmp_path / "group.yaml").write_text("group: both\ntask: [same]\n")
    ask(run.folder.path, tmp_path, "both,same", code=2)
    assert "Duplicate task 'same'" in capsys.readouterr().err


def test_a_data_set_or_metric_that_cannot_be_had_ends_with_4_and_its_task(
    run: Finished, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    write_task(tmp_path, "gone", TASKS["pick"], rows=tmp_path / "none.jsonl")
    ask(run.folder.path, tmp_path, "gone", code=4)
    assert "task gone: cannot be loaded" in capsys.readouterr().err
    text = TASKS["say"].replace("metric: exact_match", "metric: no_metric")
    write_task(tmp_path, "odd", text, rows=tasks / "rows.jsonl")
    monkeypatch.setattr("evaluate.load", lambda *_, **__: (_ for _ in ()).throw(ConnectionError("no hub")))
    ask(run.folder.path, tmp_path, "odd", code=4)
    assert "its metric no_metric cannot be loaded" in capsys.readouterr().err


def test_a_broken_or_foreign_file_of_figures_leaves_the_report_whole(run: Finished, tmp_path: Path):
    from sftplay.launch.run_folder import RunFolder
    from sftplay.report.evaluation import evaluation_blocks

    folder = RunFolder(tmp_path / "run")
    shutil.copytree(run.folder.path, folder.path, ignore=shutil.ignore_patterns("*.safetensors"))
    folder.eval.mkdir(exist_ok=True)
    for text in ("[]", '{"run": 3}', '{"run": {"a": {"acc": 7, "f1": {"value": "x"}}}, "base": [], "limit": 2}'):
        (folder.eval / "lm-eval.json").write_text(text)
        evaluation_blocks(RunFiles(folder))
