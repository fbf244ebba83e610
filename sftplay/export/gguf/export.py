"""Export a finished run as GGUF files with a Modelfile, each file held against the model before the folder appears."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sftplay import log
from sftplay.atomic import check_target
from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError, MachineError, RunError
from sftplay.export.export import Redactor, load_whole, public_run, write_json, write_records
from sftplay.export.merge import save_whole, size_bytes, write_folder
from sftplay.export.model_card import write_card
from sftplay.launch.run_folder import RunFolder
from sftplay.model.tokenizer import end_token_ids, shipped_end_ids

PARITY = "parity.json"

PROOF = "f32"
PROOF_BYTES = 8 * 2**30
"""A file in fp32 up to this size is made for the check, whatever was asked for: rounding hides a writer's faults."""


@dataclass(frozen=True)
class GgufModel:
    """A model, its tokenizer, and the files that were written of both."""

    model: Any
    tokenizer: Any
    files: Mapping[str, Path]
    """By the name of their mixture: f16, q8_0."""

    approximates: str
    """The splitting rule of the tokenizer that llama.cpp has no name for; empty where it has one."""


Prove = Callable[[GgufModel], dict[str, Any]]


def export_gguf(
    cfg: RunConfig, folder: RunFolder, *, out: Path, quants: Sequence[str], prove: Prove, llama_cpp: Path | None = None
) -> Path:
    """Write the run's model to `out` as one GGUF file for each of `quants`, with a Modelfile for Ollama.

    Next to them lie the model card, the run's records, and parity.json: what `prove` found. An adapter is merged into
    its base first. `llama_cpp` names a checkout of llama.cpp, whose converter then writes the files. `out` appears
    whole or not at all: not where `prove` raises.

    Raises:
        ConfigError: `out` exists; the architecture, the tokenizer or a mixture is not known.
        MachineError: the extra is missing, base or result cannot be read, or the disk is too small.
        RunError: a value does not fit its format, or llama.cpp computes otherwise than the model.
    """
    check_target(out)
    check_extra()
    from sftplay.export.gguf.write import check_quants, file_bytes

    if llama_cpp is None:
        check_quants(quants)
    model, tokenizer = load_whole(cfg, folder)
    write, approximates = _find_writer(model, tokenizer, cfg=cfg, folder=folder, llama_cpp=llama_cpp)
    needed = len(quants) * 2 * size_bytes(model) if llama_cpp else sum(file_bytes(model, quant) for quant in quants)
    of_proof = 4 * sum(parameter.numel() for parameter in model.parameters())
    makes_proof = PROOF not in quants and of_proof <= PROOF_BYTES
    needed += of_proof * makes_proof
    name = re.sub(r"[^\w.+-]+", "-", folder.path.resolve().name).strip("-") or "model"
    run = public_run(cfg, folder)

    def fill(scratch: Path) -> None:
        files = {}
        for quant in dict.fromkeys(quants):
            log.status(f"writing {quant}", "export")
            files[quant] = scratch / f"{name}-{quant}.gguf"
            write(files[quant], quant)
        proof = scratch / f"{name}-proof-{PROOF}.gguf"
        if makes_proof:
            log.status(f"writing {PROOF}, for the check alone", "export")
            write(proof, PROOF)
        text, reason = _make_modelfile(model, tokenizer, cfg=cfg, file=next(iter(files.values())))
        (scratch / "Modelfile").write_text(text, encoding="utf-8")
        if reason:
            log.say(f"warning: the Modelfile has no TEMPLATE: {reason}", "export")
        log.status("holding the files against the model by llama.cpp", "export")
        proven = {PROOF: proof, **files} if makes_proof else files
        found = Redactor()(prove(GgufModel(model, tokenizer, proven, approximates)))
        proof.unlink(missing_ok=True)
        shutil.rmtree(scratch / "whole", ignore_errors=True)
        write_json(scratch / PARITY, found)
        write_records(run, scratch)
        write_card(
            run,
            scratch / "README.md",
            gguf={**found, "file": next(iter(files.values())).name, "has_template": not reason},
        )

    write_folder(out, needed, fill=fill)
    log.say(f"{out}: read README.md in it before you publish; `ollama create NAME -f Modelfile` in it", "export")
    return out


def check_extra() -> None:
    """Raise MachineError where the packages of the extra `gguf` are missing."""
    for package in ("gguf", "xllamacpp"):
        if find_spec(package) is None:
            raise MachineError("is not installed", where=f"the package {package}", fix="make install EXTRAS=gguf")


def _find_writer(
    model: Any, tokenizer: Any, *, cfg: RunConfig, folder: RunFolder, llama_cpp: Path | None
) -> tuple[Callable[[Path, str], None], str]:
    """Return what writes a file of a mixture, and the splitting rule that it approximates."""
    if llama_cpp is not None:
        script = find_converter(llama_cpp)

        def convert(file: Path, quant: str) -> None:
            whole = file.parent / "whole"
            if not whole.is_dir():
                whole.mkdir()
                save_whole(model, tokenizer, cfg=cfg, folder=folder, target=whole)
            run_converter(script, whole, file, quant=quant)

        return convert, ""
    from sftplay.export.gguf.families import find_family
    from sftplay.export.gguf.vocabulary import describe_vocabulary
    from sftplay.export.gguf.write import write_gguf

    find_family(model)
    rows = model.get_input_embeddings().num_embeddings
    vocabulary = describe_vocabulary(tokenizer, rows=rows, end_ids=end_token_ids(tokenizer))
    name = folder.path.resolve().name
    return (
        lambda file, quant: write_gguf(model, vocabulary, file, quant=quant, name=name),
        vocabulary.approximates,
    )


CONVERTER = "convert_hf_to_gguf.py"
BY_CONVERTER = ("f32", "f16", "bf16", "q8_0")
"""Mixtures that llama.cpp's converter writes itself; its llama-quantize makes the others of an f16 file."""


def find_converter(checkout: Path) -> Path:
    """Return the script of a checkout of llama.cpp. Raise ConfigError where it has none."""
    script = checkout / CONVERTER
    if not script.is_file():
        what = "holds no converter of llama.cpp"
        raise ConfigError(
            what, where=f"--llama-cpp {checkout}", fix="name a checkout of https://github.com/ggml-org/llama.cpp"
        )
    return script


def run_converter(script: Path, whole: Path, file: Path, *, quant: str) -> None:
    """Let llama.cpp's own programs write the file of the model in `whole`. Raise RunError where one fails."""
    if quant in BY_CONVERTER:
        _run([sys.executable, str(script), str(whole), "--outfile", str(file), "--outtype", quant])
        return
    places = [script.parent / "build" / "bin" / "llama-quantize", script.parent / "llama-quantize"]
    program = next((place for place in places if place.is_file()), None)
    if program is None:
        what = f"{quant} needs llama-quantize, which is not built there ({places[0]})"
        fix = f"build it: cmake --build build -t llama-quantize; or choose of {', '.join(BY_CONVERTER)}"
        raise ConfigError(what, where="--llama-cpp", fix=fix)
    wide = whole / "wide-f16.gguf"
    if not wide.is_file():
        run_converter(script, whole, wide, quant="f16")
    _run([str(program), str(wide), str(file), quant.upper()])


def _run(argv: Sequence[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.strip()][-1:]
        what = f"ended with {done.returncode}: {''.join(said)}"
        raise RunError(what, where=argv[0] if argv[0] != sys.executable else argv[1], fix="see what it says by hand")


def _make_modelfile(model: Any, tokenizer: Any, *, cfg: RunConfig, file: Path) -> tuple[str, str]:
    import gguf

    from sftplay.export.gguf.modelfile import write_modelfile

    adds = gguf.GGUFReader(file).get_field(gguf.Keys.Tokenizer.ADD_BOS)
    # As text: a vocabulary of bytes has other letters for a line's end.
    ends = [tokenizer.decode([end]) for end in shipped_end_ids(model.generation_config)]
    return write_modelfile(
        file.name, tokenizer, adds_bos=bool(adds and adds.contents()), end_tokens=ends,
        system=cfg.data.system or "", sampling=model.generation_config.to_dict(),
    )  # fmt: skip
