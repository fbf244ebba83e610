"""A package `vllm` with the little that TRL's client imports of it, for a machine without a GPU.

Weights go over a plain socket in place of NCCL. TRL refuses a CPU as the device of NCCL; that refusal is passed over.
"""

from __future__ import annotations

from pathlib import Path

FILES = {
    "vllm-0.25.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 0.25.0\n",
    "vllm-0.25.0.dist-info/top_level.txt": "vllm\n",
    "vllm/__init__.py": '__version__ = "0.25.0"\nclass LLM: ...\nclass RequestOutput: ...\nclass SamplingParams: ...\n',
    "vllm/sampling_params.py": """
from trl.generation.vllm_client import VLLMClient

class StructuredOutputsParams: ...

join = VLLMClient.init_communicator
VLLMClient.init_communicator = lambda client, device: join(client, device="cuda")
""",
    "vllm/utils/__init__.py": "",
    "vllm/utils/network_utils.py": "def get_ip(): return '127.0.0.1'\n",
    "vllm/distributed/__init__.py": "",
    "vllm/distributed/weight_transfer/__init__.py": "",
    "vllm/distributed/weight_transfer/nccl_engine.py": """
import socket
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

@dataclass
class NCCLTrainerSendWeightsArgs:
    group: Any
    packed: bool

class NCCLWeightTransferEngine:
    @staticmethod
    def trainer_init(info):
        with socket.create_server(("127.0.0.1", info["master_port"])) as listener:
            return SimpleNamespace(group=SimpleNamespace(), peer=listener.accept()[0])

    @staticmethod
    def trainer_send_weights(iterator, trainer_args):
        for _, tensor in iterator:
            trainer_args.group.peer.sendall(tensor.detach().cpu().contiguous().view(-1).numpy().tobytes())
""",
}
"""Path -> text."""


def write_vllm(home: Path) -> None:
    """Write the package below `home`, which is to be on PYTHONPATH."""
    for name, text in FILES.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
