"""configs/verbs.schema.json: every verb's JSON as it says, tried on a real document of each.

All other tests hold what they see of it to the schema too (`documents`).
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import documents
import pytest
from run_outputs import Outputs
from small_run import write_small_run

from sftplay import cli
from sftplay.commands.help import EXIT_CODES
from sftplay.launch.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[1]
SCHEMA = json.loads(documents.SCHEMA.read_text(encoding="utf-8"))
needs_jsonschema = pytest.mark.skipif(documents.validator("verbs/plan") is None, reason="needs jsonschema")
pytestmark = needs_jsonschema

CONFIG = ["--config", "{config}"]
REWARDS = ["--config", "{rewards}"]

QUICK = {
    "help": [[]],
    "schema": [[], ["--verbs"]],
    "matrix": [[]],
    "gpu-info": [[]],
    "memory-check": [[]],
    "doctor": [["--fast"]],
    "setup-accelerate": [["--out", "{tmp}/accelerate.yaml"]],
    "init": [["--data", "{rows}", "--out", "{tmp}/new.yaml", "model.name={model}"]],
    "import-config": [["--in", "{tmp}/foreign.yaml", "--out", "{tmp}/imported.yaml"]],
    "validate": [CONFIG],
    "plan": [CONFIG, [*CONFIG, "--compare"], [*CONFIG, "--gpus", "2xH200"]],
    "process": [CONFIG],
    "inspect": [[*CONFIG, "--n", "2"]],
    "render": [[*CONFIG, "--n", "2"], [*CONFIG, "--out", "{tmp}/rendered.jsonl"]],
    "style": [[*CONFIG, "--style", "Rhyme."], CONFIG],
    "ingest": [["--in", "{tmp}/papers", "--out", "{tmp}/papers.jsonl"]],
    "puzzle-data": [["--kind", "sudoku4", "--out", "{tmp}/puzzles", "--workers", "1"]],
    "reward-check": [REWARDS, [*REWARDS, "--in", "{tmp}/completions.jsonl"]],
    "sandbox": [["--executor", "none", "--in", "{tmp}/jobs.jsonl", *out] for out in ([], ["--out", "{tmp}/verdicts"])],
    "submit": [[*CONFIG, "--dry-run", "--nodes", "2", "--gpus-per-node", "1"]],
    "train": [[*CONFIG, "--dry-run"]],
    "train-ray": [[*CONFIG, "--dry-run"]],
    "demo": [["--dry-run"]],
    "comm-check": [["--dry-run", "--nproc", "2"]],
    "gpu-check": [["--fast", "--only", "held on five", "--out", "{tmp}/checks"]],
}
"""Verb -> words of calls that take no training."""

OF_A_RUN = {
    "resume": [[]],
    "eval": [[]],
    "eval-test": [[]],
    "eval-quick": [[]],
    "eval-full": [[]],
    "infer-batch": [["--in", "{rows}", "--out", "{tmp}/answers.jsonl"]],
    "merge": [[]],
    "merge-test": [[]],
    "export": [[]],
    "report": [[]],
}
"""Verb -> words of calls about a finished run, in an order that works."""

ELSEWHERE = {
    "status": "tests/commands/test_status.py",
    "logs": "tests/launch/test_slurm_job.py",
    "cancel": "tests/launch/test_slurm_job.py",
    "download-model": "tests/model/test_downloads.py",
    "lm-eval": "tests/evaluate/test_harness.py",
    "eval-code": "tests/evaluate/test_eval_code.py",
    "compare": "tests/commands/test_report_commands.py",
    "sweep": "tests/runs/test_sweep.py",
    "parity": "tests/parity/test_parity.py",
}
"""Verbs that need a scheduler, a hub, a cluster or minutes -> the test in which their documents are checked."""


def document(verb: str, words: list[str], **names: object) -> Any:
    """What the verb prints; it is checked on the way."""
    with redirect_stdout(io.StringIO()) as out:
        code = cli.main([verb, *(word.format(**names) for word in words), "--json"])
    assert code == 0, out.getvalue()
    return json.loads(out.getvalue())


@pytest.fixture
def inputs_of_verbs(tmp_path: Path, inputs, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "one.txt").write_text("A river is a stream of water. " * 9)
    (tmp_path / "foreign.yaml").write_text("base_model: org/model\nrl: dpo\ndatasets: [{path: org/rows}]\n")
    (tmp_path / "jobs.jsonl").write_text(json.dumps({"code": "a = 1", "tests": ["assert a == 1"]}))
    (tmp_path / "completions.jsonl").write_text(json.dumps({"completion": "It is 4.", "answer": "4"}))
    problems = [{"question": f"What is 2 + {n}?", "answer": f"2 + {n} = {2 + n}\n#### {2 + n}"} for n in range(12)]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems))
    changes = {"task_mode": "grpo", "rewards": [{"name": "right", "use": "math"}], "model__max_seq_len": 1024}
    changes["data__val_path"] = None
    rewards = write_small_run(tmp_path, inputs, "grpo.yaml", data__train_path="problems.jsonl", **changes)
    config = write_small_run(tmp_path, inputs)
    return {"tmp": tmp_path, "config": config, "rewards": rewards, "rows": inputs.train, "model": inputs.model}


@pytest.mark.contract
@pytest.mark.parametrize("verb", QUICK)
def test_a_verb_prints_the_document_that_the_schema_describes(verb: str, inputs_of_verbs: dict[str, object]):
    for words in QUICK[verb]:
        document(verb, words, **inputs_of_verbs)


@pytest.mark.contract
@pytest.mark.slow
def test_the_documents_of_a_run_and_its_files_are_as_the_schema_says(tmp_path: Path, inputs):
    measured = {"eval__before": True, "eval__after": True, "data__test_path": str(inputs.held_out)}
    config = write_small_run(tmp_path, inputs, **measured)
    names = {"config": config, "rows": inputs.held_out, "tmp": tmp_path}
    ended = document("train", CONFIG, **names)
    assert (ended["state"], ended["exit_code"], ended["step"]) == ("done", 0, 4)
    folder = RunFolder(Path(ended["run"]))
    assert (Path(ended["result"]), Path(ended["report"])) == (folder.path / "adapter", folder.path / "report.html")
    assert ended["figures"] == {side: folder.read_json(f"eval/{side}.json") for side in ("before", "after")}
    assert ended["figures"]["after"]["n"] == 4
    for verb, calls in OF_A_RUN.items():
        for words in calls:
            found = document(verb, [*CONFIG, *words], **names)
        if verb == "resume":
            assert found == ended
    for name in ("status.json", "plan.json", "data_report.json", "eval/before.json", "eval/after.json"):
        documents.check(folder.read_json(name), f"files/{name}")
    assert len(Outputs(tmp_path).metrics("run")) == 4  # each line is checked there


def test_every_verb_with_json_has_an_entry_and_a_test_that_tries_it():
    printing = set(cli.VERBS) - set(cli.WITHOUT_JSON)
    assert set(SCHEMA["verbs"]) == printing
    assert set(QUICK) | set(OF_A_RUN) | set(ELSEWHERE) == printing
    for verb, test in ELSEWHERE.items():
        text = (ROOT / test).read_text(encoding="utf-8")
        assert f'"{verb}"' in text, verb
        assert '"--json"' in text, test


def test_a_verb_without_a_document_refuses_json(capsys: pytest.CaptureFixture[str]):
    for verb in cli.WITHOUT_JSON:
        assert cli.main([verb, "--config=run.yaml", "--json"]) == 2
        assert json.loads(capsys.readouterr().out)["error"]["what"] == f"{verb} prints no JSON document"


def test_every_definition_is_well_formed_and_used():
    from jsonschema import Draft202012Validator

    for name, definition in SCHEMA["$defs"].items():
        Draft202012Validator.check_schema(definition)
        assert f'"#/$defs/{name}"' in json.dumps(SCHEMA) or name == "error", name
    named = {part.split('"')[0] for part in json.dumps(SCHEMA).split('"#/$defs/')[1:]}
    assert named <= set(SCHEMA["$defs"])


WRONG = {
    "a key is missing": ("verbs/plan", lambda doc: doc.pop("verdict")),
    "another type": ("verbs/plan", lambda doc: doc.update(peak_bytes="many")),
    "another word": ("verbs/plan", lambda doc: doc.update(verdict="maybe")),
    "a key that is not described": ("verbs/validate", lambda doc: doc.update(more=1)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_document_that_differs_is_noticed(wrong: str, inputs_of_verbs: dict[str, object]):
    reference, spoil = WRONG[wrong]
    content = document(reference.removeprefix("verbs/"), CONFIG, **inputs_of_verbs)
    documents.check(content, reference)
    spoil(content)
    with pytest.raises(AssertionError, match=reference):
        documents.check(content, reference)


@pytest.mark.slow
def test_the_demo_prints_its_figures(tmp_path: Path, builtin_tiny: Path):
    few = [f"output_dir={tmp_path}", "train.max_steps=1", "eval.limit=2", "eval.max_new_tokens=4"]
    assert document("demo", few) == json.loads((tmp_path / "demo" / "demo.json").read_text())


def test_help_names_every_target_with_the_verb_and_the_settings_behind_it():
    found = document("help", [])
    targets = {name: target for group in found["groups"].values() for name, target in group.items()}
    assert list(targets) == re.findall(r"^([a-z][a-z0-9-]*):.*## ", (ROOT / "Makefile").read_text(), re.M)
    assert list(found["groups"])[:3] == ["help", "set up", "data"]
    assert targets["train-bnb-tb"]["verb"] == ["train", "--tb", "tuning.backend=bnb", "logging.backend=tensorboard"]
    assert targets["merge-bf16"]["verb"] == ["merge", "--dtype", "bf16"]
    assert targets["merge-bf16"]["settings"] == ["ARGS", "CONFIG", "JSON", "OUT", "RUN"]
    assert targets["bench-scaling"]["verb"] == []
    assert targets["install"]["settings"] == ["EXTRAS", "INSTALLER", "PYTHON", "TORCH_INDEX"]
    settings = re.search(r"^override SETTINGS := (.*?[^\\])\n", (ROOT / "Makefile").read_text(), re.M | re.S)
    assert settings
    assert set(found["settings"]) == set(settings[1].replace("\\\n", " ").split())
    assert found["settings"]["GRID"] == "--grid"
    assert found["settings"]["INSTALLER"] == "uv or pip; else uv where there is one"
    assert all(found["settings"].values())
    for target in targets.values():
        taken = {flag for name in target["settings"] if (flag := found["settings"][name]).startswith("--")}
        if target["verb"]:
            assert ("JSON" in target["settings"]) == (target["verb"][0] not in cli.WITHOUT_JSON)
            assert taken <= set(cli.list_flags(target["verb"][0]))
    assert found["verbs"]["sandbox"]["flags"]["--fresh"]["is_switch"]
    assert found["verbs"]["infer"]["json"] is None
    assert found["verbs"]["plan"]["needs_config"]


def test_the_codes_of_errors_are_those_of_all_errors_of_the_kit():
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "sftplay").rglob("*.py")]
    codes = {code for text in sources for code in re.findall(r'^    code = "(\w+)"$', text, re.M)}
    assert codes == set(SCHEMA["$defs"]["problem"]["properties"]["code"]["enum"])


def test_help_has_the_exit_codes_of_interfaces():
    page = (ROOT / "docs" / "interfaces.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| ([\d, ]+) \|", page.partition("## Exit codes")[2].partition("\n## ")[0], re.M)
    assert {code for row in listed for code in row.split(", ")} == {c for row in EXIT_CODES for c in row.split(", ")}


@pytest.mark.contract
def test_help_by_make_needs_neither_an_environment_nor_a_library():
    """`-S` leaves out site-packages; a Python without them is what a fresh clone has."""
    bare = subprocess.run(
        [sys.executable, "-S", "-m", "sftplay", "help", "--json"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    by_make = subprocess.run(["make", "-s", "help", "JSON=1", "PY=false"], cwd=ROOT, capture_output=True, text=True)
    assert by_make.returncode == 0, by_make.stderr
    assert json.loads(by_make.stdout) == json.loads(bare.stdout)
