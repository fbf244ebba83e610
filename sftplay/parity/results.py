"""The run's parity.json: the last result, and the last one of each engine and of each thing that it serves."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sftplay import __version__
from sftplay.atomic import read_object
from sftplay.launch.run_folder import RunFolder
from sftplay.model.start_point import digest_result

NAME = "parity.json"


def keep_result(folder: RunFolder, result: Mapping[str, Any]) -> None:
    """Write the result as the last one, next to those of other engines and files."""
    kept = read_object(folder.path / NAME).get("results")
    results = kept if isinstance(kept, dict) else {}
    key = f"{result['engine']}-{result['against']}"
    if result["against"] == "gguf":  # a run has one file for each mixture
        key += f"/{Path(result['served']).name}"
    folder.write_json(NAME, {**result, "results": {**results, key: result}})


def find_gguf_files(folder: RunFolder) -> list[Path]:
    """Return the GGUF files in the run's folder, and those that it was held against elsewhere.

    An export that is being written, or was killed, lies in a hidden folder.
    """
    kept = read_object(folder.path / NAME).get("results")
    results = [one for one in kept.values() if isinstance(one, dict)] if isinstance(kept, dict) else []
    named = [Path(str(one.get("served"))) for one in results if one.get("against") == "gguf"]
    here = [file for file in folder.path.rglob("*.gguf") if "/." not in f"/{file.relative_to(folder.path)}"]
    found = {file.resolve(): file for file in [*named, *here] if file.is_file()}
    return sorted(found.values())


def keep_export(folder: RunFolder, found: Mapping[str, Any], *, out: Path) -> None:
    """Keep what `gguf_check` found of the files in `out` as results of `make parity`, the first of them last.

    All of them passed: others are not delivered. The bound is that of Kullback and Leibler's divergence.
    """
    note = "held against the merged model by the export; `make parity ENGINE=llama.cpp` tells it from the base too"
    version = found["engine"].removeprefix("llama.cpp (").removesuffix(")")  # as `make parity` writes it
    for name, figures in reversed(found["files"].items()):
        if not (out / name).is_file():  # the file in fp32 that was made for the check alone
            continue
        exact = figures["kind"] == "f32"
        result = {
            "engine": "llama.cpp", "version": version, "against": "gguf", "served": str(out / name),
            "url": None, "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "kit": __version__, "n": found["n_prompts"],
            "prompts": found["prompts"], "max_new_tokens": max(1, figures["positions"] // found["n_prompts"]),
            "same_prompt_ids": found["n_prompts"], "same_answer_ids": figures["same_answers"], "ties": 0,
            "max_logprob_diff": figures["max_logprob_diff"], "bound": None,
            "divergence": figures["max_kl" if exact else "mean_kl"], "divergence_bound": figures["bound"],
            "adapter_changes_answers": None, "weights": digest_result(folder.result), "verdict": "ok", "cause": None,
            "faults": [], "notes": [note],
        }  # fmt: skip
        keep_result(folder, result)
