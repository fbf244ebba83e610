"""`export --format gguf` on a tiny finished run: the folder, its documents, refusals; and llama.cpp's own converter."""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import documents
import pytest
from gguf_models import make_model
from huggingface_hub import ModelCard
from in_process import Finished, Inputs, train
from ollama import parse_modelfile, render_go
from transformers import AutoTokenizer

from sftplay import cli

gguf = pytest.importorskip("gguf", reason="needs make install EXTRAS=gguf")
pytest.importorskip("xllamacpp", reason="needs make install EXTRAS=gguf")

from sftplay.export.gguf import export as gguf_export  # noqa: E402
from sftplay.export.gguf import families  # noqa: E402
from sftplay.parity import gguf_check  # noqa: E402

pytestmark = pytest.mark.usefixtures("verbs_environment")
SYSTEM = "Answer in one word."


@pytest.fixture(scope="module")
def run(chat_rows: Path, held_out_rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    home = tmp_path_factory.mktemp("gguf place")
    model, tokenizer = make_model("qwen3")
    model.save_pretrained(home / "base")
    tokenizer.save_pretrained(home / "base")
    return train(home, Inputs(home / "base", chat_rows, held_out_rows), data__system=SYSTEM, eval__after=True)


@pytest.fixture
def call(run: Finished, capsys: pytest.CaptureFixture[str]) -> Any:
    """Exports the run: (exit code, document, error output)."""

    def call(*words: object) -> tuple[int, Any, str]:
        capsys.readouterr()
        config = run.folder.path.parents[1] / "run.yaml"
        code = cli.main(["export", "--config", str(config), "--json", *map(str, words)])
        printed, said = capsys.readouterr()
        return code, json.loads(printed), said

    return call


@pytest.fixture(scope="module")
def positions() -> Any:
    """Fewer of them than users get: the machine is shared."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_check, "POSITIONS", 40)
        patch.setattr(gguf_check.make_sequences, "__kwdefaults__", {"positions": 40})
        yield


@pytest.mark.slow
def test_the_folder_holds_checked_files_a_modelfile_and_a_card(
    call: Any, run: Finished, positions: Any, tmp_path: Path
):
    out = tmp_path / "out"
    code, document, said = call("--format", "gguf", "--quant", "f16,q8_0", "--out", out)
    assert code == 0, said
    documents.check(document, "verbs/export")
    name = run.folder.path.name
    files = {f"{name}-f16.gguf", f"{name}-q8_0.gguf"}
    assert {path.name for path in out.glob("*.gguf")} == files  # the one in fp32 was for the check
    assert document["parity"] == json.loads((out / "parity.json").read_text())
    assert document["parity"]["files"].keys() == files | {f"{name}-proof-f32.gguf"}
    assert document["parity"]["tokens"]["same"] == 1000
    assert document["parity"]["tokens"]["own_texts"] > document["parity"]["n_prompts"]  # of the measurement too
    commands = parse_modelfile((out / "Modelfile").read_text())
    assert commands[0] == ("FROM", f"./{name}-f16.gguf")
    assert ("SYSTEM", SYSTEM) in commands
    assert ("PARAMETER stop", "<|im_end|>") in commands
    dialogue = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "why"}]
    tokenizer = AutoTokenizer.from_pretrained(run.folder.result)
    expected = tokenizer.apply_chat_template(dialogue, tokenize=False, add_generation_prompt=True)
    assert render_go(dict(commands)["TEMPLATE"], dialogue) == expected
    card = ModelCard((out / "README.md").read_text())
    assert card.data.library_name == "gguf"
    assert f"{name}-q8_0.gguf | " in card.text
    assert f"--model {name}-f16.gguf\n" in card.text  # not the one that was for the check
    assert str(Path.home()) not in card.text
    assert str(run.folder.path.parents[1]) not in "".join(path.read_text() for path in out.glob("*.[jmy]*"))
    reader = gguf.GGUFReader(out / f"{name}-q8_0.gguf")
    assert reader.get_field("tokenizer.chat_template").contents() == tokenizer.chat_template
    assert not any(str(run.folder.path.parents[1]) in str(field.contents()) for field in reader.fields.values())

    kept = json.loads((run.folder.path / "parity.json").read_text())
    documents.check(kept, "files/parity.json")
    assert kept["results"].keys() == {f"llama.cpp-gguf/{file}" for file in files}
    assert (kept["engine"], kept["verdict"], Path(kept["served"]).name) == ("llama.cpp", "ok", f"{name}-f16.gguf")
    assert kept["n"] == kept["same_prompt_ids"] == document["parity"]["n_prompts"]
    q8_0 = document["parity"]["files"][f"{name}-q8_0.gguf"]
    n = kept["n"]
    row = f"| {n} of {n} | {q8_0['same_answers']} of {n} | KL {q8_0['mean_kl']:.2g} | KL 0.01 | ok"
    engines = card.text.partition("## Engines")[2].partition("\n## ")[0]
    assert row in engines
    assert f"{name}-f16.gguf" in engines
    assert f"{name}-q8_0.gguf" in (run.folder.path / "report.html").read_text()

    with redirect_stdout(io.StringIO()) as printed:
        assert cli.main(["parity", "--run", str(run.folder.path), "--engine", "llama.cpp", "--json"]) == 2
    error = json.loads(printed.getvalue())["error"]
    assert f"has 2 GGUF files: {name}-f16.gguf, {name}-q8_0.gguf" in error["what"]
    assert error["fix"] == f"name one: --served={out / name}-f16.gguf"  # though it does not lie in the run's folder


@pytest.mark.slow
def test_a_file_that_fails_its_check_ends_with_5_and_leaves_nothing(
    call: Any, positions: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # In the family qwen3 nothing may be permuted.
    monkeypatch.setitem(
        families.FAMILIES, "Qwen3ForCausalLM", replace(families.FAMILIES["Qwen3ForCausalLM"], permutes=True)
    )
    code, document, _ = call("--format", "gguf", "--quant", "q8_0", "--out", tmp_path / "out")
    assert code == 5
    assert "answers otherwise than the model" in document["error"]["what"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--format", "gguf", "--quant", "q3_k_s"], "'q3_k_s' is not written here"),
        (["--format", "gguf", "--dtype", "bf16"], "does not go with --format gguf"),
        (["--quant", "f16"], "is of the format gguf"),
        (["--llama-cpp", "x"], "is of the format gguf"),
        (["--format", "gguf", "--llama-cpp", "nowhere"], "holds no converter of llama.cpp"),
    ],
)
def test_what_does_not_go_together_is_refused(words: list[str], what: str, call: Any, tmp_path: Path):
    code, document, _ = call(*words, "--out", tmp_path / "out")
    assert code == 2
    assert what in document["error"]["what"]
    assert list(tmp_path.iterdir()) == []


STAND_IN = """
import pathlib, shutil, sys
assert sys.argv[2] == "--outfile" and sys.argv[4] == "--outtype", sys.argv
names = {path.name for path in pathlib.Path(sys.argv[1]).iterdir()}
assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= names, names
shutil.copyfile(pathlib.Path(__file__).with_name(f"made-{sys.argv[5]}.gguf"), sys.argv[3])
"""


@pytest.mark.slow
def test_with_a_checkout_its_own_converter_writes_the_files_and_they_are_checked(
    call: Any, positions: Any, tmp_path: Path
):
    """A stand-in takes the converter's command line, and gives the kit's own file or one of another model."""
    code, _, said = call("--format", "gguf", "--quant", "f32", "--out", tmp_path / "own")
    assert code == 0, said
    checkout = tmp_path / "llama.cpp"
    checkout.mkdir()
    (checkout / "convert_hf_to_gguf.py").write_text(STAND_IN)
    made = checkout / "made-f32.gguf"
    next((tmp_path / "own").glob("*.gguf")).rename(made)
    words = ("--format", "gguf", "--quant", "f32", "--llama-cpp", checkout)
    code, document, said = call(*words, "--out", tmp_path / "theirs")
    assert code == 0, said
    assert len(document["parity"]["files"]) == 1
    assert not (tmp_path / "theirs" / "whole").exists()
    data = bytearray(made.read_bytes())
    data[-4096:] = bytes(4096)
    made.write_bytes(data)
    code, document, _ = call(*words, "--out", tmp_path / "broken")
    assert (code, document["error"]["code"]) == (5, "run")


def test_k_quants_of_a_checkout_come_from_its_llama_quantize(tmp_path: Path):
    script = tmp_path / "convert_hf_to_gguf.py"
    script.write_text("import sys; open(sys.argv[3], 'w').write('wide')")
    whole = tmp_path / "whole"
    whole.mkdir()
    with pytest.raises(Exception, match="needs llama-quantize"):
        gguf_export.run_converter(script, whole, tmp_path / "x.gguf", quant="q4_k_m")
    program = tmp_path / "build" / "bin" / "llama-quantize"
    program.parent.mkdir(parents=True)
    program.write_text(
        f"#!{sys.executable}\nimport sys; open(sys.argv[2], 'w').write(open(sys.argv[1]).read() + sys.argv[3])"
    )
    program.chmod(0o755)
    gguf_export.run_converter(script, whole, tmp_path / "x.gguf", quant="q4_k_m")
    assert (tmp_path / "x.gguf").read_text() == "wideQ4_K_M"
