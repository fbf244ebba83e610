"""merge, merge-test, export and serve as commands, on one tiny finished run."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import Finished, Inputs, train
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from sftplay import cli
from sftplay.export import server
from sftplay.machine.ports import HOST

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.usefixtures("verbs_environment")

IDS = torch.arange(3, 60)[None]


@pytest.fixture(scope="module")
def run(tiny_llama: Path, chat_rows: Path, held_out_rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    home = tmp_path_factory.mktemp("deliver place")
    return train(home, Inputs(tiny_llama, chat_rows, held_out_rows), train__learning_rate=0.05)


@pytest.fixture(scope="module")
def config(run: Finished) -> Path:
    return run.folder.path.parents[1] / "run.yaml"


@pytest.fixture(scope="module")
def merged(run: Finished, config: Path) -> Path:
    assert cli.main(["merge", "--config", str(config)]) == 0
    return run.folder.path / "merged"


@pytest.fixture
def call(config: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a verb on the run: (exit code, standard output, error output)."""

    def call(verb: str, *arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.main([verb, "--config", str(config), *map(str, arguments)])
        return code, *capsys.readouterr()

    return call


def scores(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits.float()


@pytest.mark.contract
def test_merge_leaves_a_model_that_plain_transformers_computes_with_as_peft_does(run: Finished, merged: Path):
    expected = scores(AutoPeftModelForCausalLM.from_pretrained(run.folder.path / "adapter"))
    untuned = scores(AutoModelForCausalLM.from_pretrained(run.cfg.model.name))
    actual = scores(AutoModelForCausalLM.from_pretrained(merged))
    assert float((actual - expected).abs().max()) < 1e-5 < float((expected - untuned).abs().max())


@pytest.mark.contract
def test_merge_in_bf16_goes_to_a_folder_of_its_own_and_says_how_to_compare_it(run: Finished, merged: Path, call: Any):
    code, out, err = call("merge", "--dtype", "bf16", "--json")
    target = run.folder.path / "merged-bf16"
    assert (code, json.loads(out)) == (0, {"merged": str(target)})
    assert f'make merge-test MERGED="{target}"' in err
    assert {value.dtype for value in load_file(target / "model.safetensors").values()} == {torch.bfloat16}
    code, out, _ = call("merge-test", "--merged", target, "--json")
    figures = json.loads(out)
    assert (code, figures["dtype"], figures["texts_equal"]) == (0, "bfloat16", True)


@pytest.mark.contract
def test_merge_test_agrees_with_what_merge_made_and_gives_its_figures(merged: Path, call: Any):
    code, out, err = call("merge-test", "--json")
    figures = json.loads(out)
    assert (code, figures["texts_equal"], figures["n"]) == (0, True, 8)
    assert 0 <= figures["max_abs_logit_diff"] <= figures["tolerance"]
    assert "agree: scores within" in err


@pytest.mark.contract
def test_merge_test_ends_with_5_when_one_tensor_was_altered(merged: Path, call: Any, tmp_path: Path):
    altered = tmp_path / "altered"
    altered.mkdir()
    for file in merged.iterdir():
        (altered / file.name).write_bytes(file.read_bytes())
    weights = load_file(altered / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] += 0.5
    save_file(weights, altered / "model.safetensors", metadata={"format": "pt"})
    code, _, err = call("merge-test", "--merged", altered)
    assert code == 5
    assert "altered: model.layers.1.mlp.up_proj.weight" in err


@pytest.mark.contract
def test_export_says_where_it_is_and_stands_alone(run: Finished, call: Any, tmp_path: Path):
    code, out, _ = call("export", "--out", tmp_path / "mine", "--json")
    assert (code, json.loads(out)) == (0, {"export": str(tmp_path / "mine")})
    assert {"README.md", "model.safetensors", "chat_template.jinja"} <= {p.name for p in (tmp_path / "mine").iterdir()}
    expected = scores(AutoPeftModelForCausalLM.from_pretrained(run.folder.path / "adapter"))
    assert float((scores(AutoModelForCausalLM.from_pretrained(tmp_path / "mine")) - expected).abs().max()) < 1e-5
    assert not (run.folder.path / "export").exists()


@pytest.mark.contract
@pytest.mark.parametrize(
    ("verb", "arguments", "message"),
    [
        ("merge", [], "exists already"),
        ("merge", ["--dtype", "int4"], "argument --dtype: invalid choice: 'int4'"),
        ("merge", ["--run", "none"], "no run 'none'"),
        ("merge-test", ["--merged", "/nowhere"], "no merged model here"),
        ("export", ["--out", "{run}/adapter"], "exists already"),
        ("serve", ["--port", "70000"], "not a port: '70000'"),
        ("serve", ["--port", "-1"], "not a port: '-1'"),
        ("serve", ["--engine", "ollama"], "argument --engine: invalid choice: 'ollama'"),
        ("serve", ["--server", "ollama"], "argument --server: invalid choice: 'ollama'"),
        ("serve", ["--weights", "gguf"], "argument --weights: invalid choice: 'gguf'"),
    ],
)
def test_what_cannot_be_done_is_refused_with_2(
    verb: str, arguments: list[str], message: str, run: Finished, merged: Path, call: Any
):
    code, out, err = call(verb, *(word.format(run=run.folder.path) for word in arguments))
    assert (code, out.count("Traceback")) == (2, 0)
    assert message in err


@pytest.mark.parametrize("verb", ["merge", "merge-test", "export", "serve"])
def test_a_run_without_a_result_is_refused(verb: str, run: Finished, call: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server, "find_spec", lambda name: True)
    hidden = run.folder.path / "adapter"
    hidden.rename(run.folder.path / "away")
    try:
        code, _, err = call(verb)
        with run.folder.locked():
            code_of_running, _, said = call(verb)
    finally:
        (run.folder.path / "away").rename(hidden)
    assert (code, code_of_running) == (2, 2)
    assert "this run has no result yet\n  fix: finish it with `make resume`" in err
    assert "this run has no result yet\n  fix: wait for its end: it runs" in said


def test_serve_without_its_packages_names_the_command_that_brings_them(call: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server, "find_spec", lambda name: None)
    code, _, err = call("serve", "--engine", "transformers")
    assert code == 3
    assert "needs fastapi, uvicorn, openai" in err
    assert "fix: make install EXTRAS=serve" in err


def test_serve_by_vllm_without_it_names_the_command_that_brings_it(call: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server, "find_python", lambda: None)
    code, _, err = call("serve", "--engine", "vllm")
    assert code == 3
    assert "vLLM is not installed" in err
    assert "fix: make install-vllm" in err


def test_an_adapter_on_its_base_is_refused_by_transformers_server(call: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server, "find_spec", lambda name: True)
    code, out, err = call("serve", "--engine", "transformers", "--weights", "adapter")
    assert code == 2
    assert "transformers' server takes no adapter" in err
    assert "loading libraries" not in out


def test_serve_on_a_port_in_use_is_refused_before_anything_is_loaded(call: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server, "find_spec", lambda name: True)
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        code, out, err = call("serve", "--port", taken.getsockname()[1], "--server", "transformers")
    assert code == 3
    assert "something listens here already" in err
    assert "loading libraries" not in out


@pytest.mark.parametrize("verb", ["merge", "export"])
def test_a_folder_that_is_there_is_refused_before_a_library_is_imported(verb: str, run: Finished, config: Path):
    words = [verb, "--config", str(config), "--out", str(run.folder.path / "adapter")]
    ends = f"print(cli.main({words!r}), {{'torch', 'huggingface_hub'}} & set(sys.modules))"
    code = f"import sys; from sftplay import cli; {ends}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[-2] == "2 set()", done.stdout + done.stderr
