"""The scripts in workflows/, run as a user types them, on tiny data and from another folder."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from processes import HANG_S
from score_run import score_inputs, score_options
from small_run import WORDS, Inputs, write_small_run

from sftplay.config.load import load_resolved

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = (
    "quick_start",
    "batch_process",
    "docs_to_model",
    "sft_then_grpo",
    "sft_then_dpo",
    "score_ablation",
    "grpo_gsm8k",
    "grpo_mbpp",
)

Workflow = Callable[..., CompletedProcess[str]]


@pytest.mark.contract
@pytest.mark.parametrize("path", sorted((ROOT / "workflows").glob("*.sh")), ids=lambda path: path.stem)
def test_bash_can_read_the_script(path: Path):
    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0
    if checker := shutil.which("shellcheck"):
        done = subprocess.run([checker, "-x", path.name], cwd=path.parent, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


@pytest.mark.contract
@pytest.mark.parametrize("name", SCRIPTS)
def test_help_shows_how_to_call_the_script(name: str, tmp_path: Path):
    done = subprocess.run(
        [str(ROOT / "workflows" / f"{name}.sh"), "--help"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert f"workflows/{name}.sh " in done.stdout
    assert not [line for line in done.stdout.splitlines() if line.startswith("#") or "set -e" in line]


@pytest.mark.contract
@pytest.mark.parametrize(
    ("call", "what"),
    [
        ("quick_start nonsense", "no argument called 'nonsense'"),
        ("docs_to_model", "no folder of documents is given"),
        ("docs_to_model --by", "--by needs a value"),
        ("docs_to_model --by page .", "--by 'page' is unknown"),
        ("docs_to_model . a.jsonl b.jsonl", "3 paths are given"),
        ("docs_to_model nowhere", "nowhere"),
        ("docs_to_model . chats.jsonl", "chats.jsonl"),
        ("docs_to_model --fast .", "no option called '--fast'"),
        ("sft_then_grpo rows.jsonl", "no option called 'rows.jsonl'"),
        ("sft_then_grpo --sft", "--sft needs a value"),
        ("sft_then_grpo --grpo none.yaml", "none.yaml"),
        ("sft_then_dpo --dpo", "--dpo needs a value"),
        ("sft_then_dpo --dpo none.yaml", "none.yaml"),
        ("score_ablation toy.yaml", "no option called 'toy.yaml'"),
        ("score_ablation --config none.yaml", "none.yaml"),
        ("grpo_gsm8k rows.jsonl", "no option called 'rows.jsonl'"),
        ("grpo_gsm8k --data nowhere", "nowhere"),
        ("grpo_mbpp --model", "--model needs a value"),
        ("batch_process", "no config is given"),
        ("batch_process rows.jsonl", "no config is given"),
        ("batch_process --verbose a.yaml", "no option called '--verbose'"),
    ],
)
def test_a_call_that_cannot_be_is_refused_before_anything_starts(call: str, what: str, tmp_path: Path):
    name, *words = call.split()
    done = subprocess.run(
        [str(ROOT / "workflows" / f"{name}.sh"), *words], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PY": "no-such-python"},
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith(f"{name}.sh: ")
    assert what in done.stderr
    assert "\n  fix: " in done.stderr


def test_a_row_of_runs_that_is_stopped_between_two_of_them_does_not_end_well():
    words = f". {ROOT}/workflows/environment.sh; PY=false; begin_runs; pass_on TERM; train_next a b; exit $first"
    assert subprocess.run(["bash", "-c", words], check=False).returncode == 143


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout whose outputs and processed rows are its own."""
    kit = tmp_path_factory.mktemp("a kit") / "kit"
    (kit / "data").mkdir(parents=True)
    for name in ("sftplay", "workflows", "configs", "Makefile", "data/anchor", "data/base", "data/demo"):
        (kit / name).symlink_to(ROOT / name)
    return kit


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the user's, with a space in its name."""
    return tmp_path_factory.mktemp("some user")


@pytest.fixture(scope="module")
def workflow(kit: Path, home: Path, forked_python: Path) -> Workflow:
    """Calls a script of the kit from the user's folder."""

    def call(name: str, *words: object, python: object = forked_python) -> CompletedProcess[str]:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PY": str(python), "SFTPLAY_CACHE": str(ROOT / ".cache")}
        return subprocess.run(
            [str(kit / "workflows" / f"{name}.sh"), *map(str, words)], cwd=home, env=env, capture_output=True,
            text=True, timeout=3 * HANG_S, check=False,
        )  # fmt: skip

    return call


def configs(home: Path, inputs: Inputs, *names: str) -> list[Path]:
    return [write_small_run(home, inputs, name, run_name=None, train__max_steps=2) for name in names]


def rows_of_table(text: str) -> dict[str, list[str]]:
    table = text.partition("] summary\n")[2].splitlines()
    assert table[0].split() == ["run", "state", "exit", "code", "steps", "loss", "seconds"]
    return {line.split()[0]: line.split()[1:] for line in table[1:]}


@pytest.mark.contract
@pytest.mark.slow
def test_of_many_runs_one_that_fails_does_not_stop_the_rest(
    workflow: Workflow, home: Path, inputs: Inputs, forked_python: Path, tmp_path: Path
):
    good, bad = configs(home, inputs, "good run.yaml", "bad.yaml")
    bad.write_text(bad.read_text().replace(str(inputs.train), str(home / "nowhere.jsonl")))
    slow_python = tmp_path / "python"
    slow_python.write_text(f'#!/bin/sh\nsleep 1.1\nexec "{forked_python}" "$@"\n')
    slow_python.chmod(0o755)
    began = time.monotonic()
    done = workflow("batch_process", "--name", "night", "bad.yaml", "good run.yaml", python=slow_python)
    took = time.monotonic() - began
    assert done.returncode == 4, done.stdout + done.stderr
    table = rows_of_table(done.stdout)
    assert table["night-bad"][:4] == ["refused", "4", "-", "-"]
    state, code, steps, loss, seconds = table["night-good-run"]
    metrics = [
        json.loads(line) for line in (home / "outputs" / "night-good-run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert (state, code, steps) == ("done", "0", "2")
    assert float(loss) == pytest.approx(metrics[-1]["loss"], abs=1e-4)
    assert 1 <= int(seconds) <= took
    again = workflow("batch_process", "--name", "night", good.name)
    assert again.returncode == 0
    assert rows_of_table(again.stdout)["night-good-run"][:3] == ["done", "0", "2"]
    assert len((home / "outputs" / "night-good-run" / "metrics.jsonl").read_text().splitlines()) == len(metrics)


@pytest.mark.contract
@pytest.mark.slow
def test_a_signal_stops_the_run_with_a_checkpoint_and_all_that_would_follow(
    kit: Path, home: Path, inputs: Inputs, tmp_path: Path
):
    (config,) = configs(tmp_path, inputs, "long.yaml")
    values = ["train.max_steps=100000", "train.save_steps=100000", f"output_dir={tmp_path / 'out'}"]
    script = subprocess.Popen(
        [str(kit / "workflows" / "batch_process.sh"), "--name", "b", str(config), str(inputs.train),
         str(inputs.held_out), "--", *values, "data.val_path=null"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PY": sys.executable}, text=True, stdout=subprocess.PIPE, cwd=home,
    )  # fmt: skip
    metrics = next(iter((tmp_path / "out").glob("*/metrics.jsonl")), None)
    limit = time.monotonic() + HANG_S
    while not (metrics and metrics.stat().st_size) and time.monotonic() < limit:
        time.sleep(0.2)
        metrics = next(iter((tmp_path / "out").glob("*/metrics.jsonl")), None)
    script.send_signal(signal.SIGTERM)
    shown, _ = script.communicate(timeout=HANG_S)
    assert script.returncode == 143
    stopped, left = rows_of_table(shown).values()
    assert stopped[:2] == ["stopped", "143"]
    assert int(stopped[2]) >= 1
    assert left[:3] == ["not", "started", "-"]
    (checkpoint,) = (tmp_path / "out").glob("b-*/checkpoints/*/COMPLETE.json")
    assert checkpoint.parent.name == f"checkpoint-{stopped[2]}"


@pytest.mark.contract
@pytest.mark.slow
def test_the_ablation_of_two_turns_ends_in_one_table(
    workflow: Workflow, home: Path, tmp_path: Path, forked_python: Path
):
    options = score_options(
        run_name=None, train__max_steps=1, train__effective_batch_size=4, train__batch_size=4, eval__limit=2,
        eval__before=False, eval__after=False,
    )  # fmt: skip
    config = write_small_run(home, score_inputs(tmp_path, steps=3), "two-turns.yaml", **options)
    # Two of the six are trained; the others fail, and stop nothing.
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\ncase "$*" in *guidance=none* | *value_coef=0.001*) ;; *"sftplay train"*) exit 4 ;; esac\n'
        f'exec "{forked_python}" "$@"\n'
    )
    python.chmod(0o755)
    done = workflow("score_ablation", "--name", "small", "--config", config.name, python=python)
    assert done.returncode == 4, done.stdout + done.stderr
    head, *table = done.stdout.partition("] summary\n")[2].splitlines()
    kinds = ["none", "static", "model", "model_trained-0.1", "model_trained-0.01", "model_trained-0.001"]
    trained = kinds[::5]
    cells = {row.split()[0]: row.split()[1:] for row in table}
    assert list(cells) == [f"small-{kind}" for kind in kinds]
    assert [kind for kind in kinds if cells[f"small-{kind}"][:2] == ["0", "1"]] == trained
    assert all(cells[f"small-{kind}"][:3] == ["4", "-", "-"] for kind in kinds if kind not in trained)
    for kind, row in zip(trained, table[::5], strict=True):
        run = home / "outputs" / f"small-{kind}"
        last = json.loads((run / "eval" / "step-1.json").read_text())
        shown = dict(zip(head.replace("exit code", "code").split(), row.split(), strict=False))
        for name in ("acc_t1", "acc_t2", "delta", "i2c", "c2i", "acc_t2_empty", "acc_t2_static"):
            assert float(shown[name]) == pytest.approx(last[name], abs=1e-3)
        assert row.endswith(last["diagnosis"])
        resolved = load_resolved(run / "config.resolved.yaml").score
        assert "-".join([resolved.guidance, *[f"{resolved.value_coef:g}"][: "trained" in kind]]) == kind


@pytest.mark.slow
def test_documents_become_a_merged_model_that_plain_transformers_opens(
    workflow: Workflow, kit: Path, home: Path, inputs: Inputs
):
    from transformers import AutoModelForCausalLM

    documents = home / "my documents"
    (documents / "deep").mkdir(parents=True)
    for n in range(24):
        words = random.Random(n).choices(WORDS, k=60 + n)
        (documents / ("deep" if n % 2 else "") / f"page {n}.md").write_text(f"# Page {n}\n\n{' '.join(words)}.\n")
    values = [f"model.name={inputs.model}", "model.max_seq_len=64", "train.max_steps=3", "eval.limit=2",
              "eval.max_new_tokens=4", "train.effective_batch_size=4", "datasets.domain.split=0.2"]  # fmt: skip
    done = workflow("docs_to_model", "my documents", inputs.train, "--", *values)
    assert done.returncode == 0, done.stdout + done.stderr
    run = kit / "outputs" / "my-documents-dapt"
    content = json.loads((run / "eval" / "perplexity.json").read_text())
    assert content["sources"]["domain"]["perplexity_after"] < content["sources"]["domain"]["perplexity_before"]
    assert content["anchor"]["chat"]["n"] == 2
    assert AutoModelForCausalLM.from_pretrained(run / "merged").num_parameters() > 0
    assert re.search(r"domain +[\d,]+ +[\d.]+ -> [\d.]+", done.stdout)
    assert "outputs/my-documents-dapt/report.html" in done.stdout
    assert len((kit / "data" / "processed" / "my-documents-dapt-documents.jsonl").read_text().splitlines()) >= 20


@pytest.mark.contract
@pytest.mark.slow
def test_the_quick_start_trains_and_answers(workflow: Workflow, kit: Path, builtin_tiny: Path):
    values = ["train.max_steps=2", "eval.limit=2", "eval.max_new_tokens=4"]
    done = workflow("quick_start", "--", *values)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^demo: exact match ", done.stdout, re.MULTILINE)
    assert re.search(r"^model  ", done.stdout, re.MULTILINE)
    assert (kit / "outputs" / "demo" / "demo.json").is_file()


@pytest.mark.contract
@pytest.mark.slow
def test_problems_without_a_gpu_are_learned_by_the_tiny_model_which_is_said_and_both_accuracies_are_shown(
    workflow: Workflow, kit: Path, home: Path, builtin_tiny: Path
):
    problems = home / "math problems"
    problems.mkdir()
    for name, source, n in (("train", "train", 24), ("test", "held_out", 4)):
        lines = (ROOT / "data" / "word_problems" / f"{source}.jsonl").read_text().splitlines()[:n]
        (problems / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    values = ["train.max_steps=1", "grpo.max_completion_length=8", "train.effective_batch_size=8", "eval.limit=4"]
    done = workflow("grpo_gsm8k", "--data", "math problems", "--name", "few", "--", *values)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no GPU is found: builtin:tiny learns in place of Qwen/Qwen2.5-0.5B-Instruct" in done.stdout
    sides = [
        json.loads((kit / "outputs" / "few" / "eval" / f"{side}.json").read_text()) for side in ("before", "after")
    ]
    shown = done.stdout.partition("4 of 4: accuracy")[2]
    for title, side in zip(("before", "after"), sides, strict=True):
        assert side["n"] == 4
        assert re.search(
            rf"^{title} +{side['pass']:.3f} \+- {side['pass_stderr']:.3f} +\(4 problems", shown, re.MULTILINE
        )
    error = math.hypot(*(side["pass_stderr"] for side in sides))
    assert re.search(rf"^change +[+-]0\.\d{{3}} \+- {error:.3f}", shown, re.MULTILINE)
    assert (kit / "outputs" / "few" / "report.html").is_file()
