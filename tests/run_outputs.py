"""What runs have left below an output folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import documents
from safetensors.torch import load_file
from torch import Tensor

from sftplay.launch.run_folder import RunFolder


@dataclass
class Outputs:
    """Runs by their names, below `root`/outputs."""

    root: Path

    def folder(self, name: str) -> RunFolder:
        return RunFolder(self.root / "outputs" / name)

    def status(self, name: str) -> dict[str, Any]:
        status = self.folder(name).read_json("status.json")
        if "state" in status:  # else the run has not started
            documents.check(status, "files/status.json")
        return status

    def metrics(self, name: str) -> list[dict[str, Any]]:
        """The lines that are written to their end; none where there is no file yet."""
        path = self.folder(name).metrics
        lines = [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []
        for line in lines:
            documents.check(line, "files/metrics.jsonl")
        return lines

    def weights(self, name: str) -> dict[str, Tensor]:
        return load_file(self.folder(name).path / "adapter" / "adapter_model.safetensors")

    def complete(self, name: str) -> list[int]:
        """Steps of the checkpoints that count."""
        found = self.folder(name).checkpoints.glob("checkpoint-*/COMPLETE.json")
        return sorted(int(path.parent.name.rpartition("-")[2]) for path in found)

    def cut_off(self, name: str, step: int) -> None:
        """Leave a finished run as one that died right behind its checkpoint at `step`."""
        folder = self.folder(name)
        folder.update_status(state="failed", exit_code=5)
        for checkpoint in folder.checkpoints.glob("checkpoint-*"):
            if checkpoint.name != f"checkpoint-{step}":
                (checkpoint / "COMPLETE.json").unlink(missing_ok=True)
