"""vLLM as the sampler on a machine without a GPU: weights over gloo, and packed again where vLLM has packed them.

vLLM sends weights by NCCL alone, which needs GPUs. On a CPU only that way is ours; protocol, sampling and loading of
weights are vLLM's and TRL's own. vLLM loads this module in all of its processes by the entry point
`vllm.general_plugins`, the trainer where `GlooClient` or `Colocated` is wanted. It imports vLLM, and so only its Python
can load it (vLLM 0.31, trl 1.16).
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import requests
import torch
from torch import Tensor, nn
from torch.distributed import BroadcastOptions, ProcessGroupGloo, TCPStore
from trl.generation.vllm_client import VLLMClient
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from sftplay.errors import MachineError, RunError
from sftplay.launch.generation_server import GLOO
from sftplay.machine.ports import free_port

LIMIT = timedelta(minutes=5)
"""How long one side waits for the other, which may be busy with tensors of its own."""

GROUP_PORT = 51216  # TRL's default, at which two runs on one machine would meet each other's server
WHERE = "grpo.generation"


def register() -> None:
    """Tell vLLM of the engine. vLLM may call it several times in a process."""
    if GLOO not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(GLOO, GlooEngine)


def own_address(host: str, port: int) -> str:
    """Return the address by which this machine reaches `host`; nothing is sent."""
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


class Group:
    """The trainer, rank 0, and vLLM's workers: they meet at the trainer's address."""

    def __init__(self, address: str, port: int, *, rank: int, world_size: int) -> None:
        self._store = TCPStore(address, port, world_size, is_master=rank == 0, timeout=LIMIT, wait_for_workers=False)
        options = ProcessGroupGloo._Options()
        # By default gloo takes the address that the machine's name stands for, which others may not reach.
        options._devices = [ProcessGroupGloo.create_device(hostname=own_address(address, port))]
        options._timeout = LIMIT
        self._group = ProcessGroupGloo(self._store, rank, world_size, options)

    def broadcast(self, tensor: Tensor) -> None:
        """Send the trainer's tensor, or receive it into this one."""
        chosen = BroadcastOptions()
        chosen.rootRank = 0
        self._group.broadcast([tensor], chosen).wait()


@dataclass
class Meeting(WeightTransferInitInfo):
    """Where trainer and workers meet."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int


@dataclass
class Announced(WeightTransferUpdateInfo):
    """The tensors that follow, in their order."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class GlooEngine(WeightTransferEngine[Meeting, Announced]):
    """Receives weights in a worker of vLLM, and loads them as its NCCL engine does."""

    init_info_cls = Meeting
    update_info_cls = Announced
    _group: Group | None = None

    def init_transfer_engine(self, init_info: Meeting) -> None:
        """Meet the trainer; a later one takes the place of an earlier one."""
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank + init_info.rank_offset
        self._group = Group(init_info.master_address, init_info.master_port, rank=rank, world_size=init_info.world_size)

    def start_weight_update(self) -> None:
        """Make room for weights as they stand in a checkpoint."""
        begin_reload(self.model)

    def receive_weights(self, update_info: Announced) -> None:
        """Load one tensor after the other."""
        assert self._group is not None, "no trainer has come"
        for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            weight = torch.empty(shape, dtype=getattr(torch, dtype))
            self._group.broadcast(weight)
            self.model.load_weights([(name, weight)])

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load what comes. vLLM's own method waits for an accelerator behind it, and there is none."""
        self.receive_weights(self.parse_update_info(update_info))

    def finish_weight_update(self) -> None:
        """Let vLLM make of the weights what it computes with."""
        finish_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Leave the trainer."""
        self._group = None


def begin_reload(model: nn.Module) -> None:
    """Give the layers of a model in vLLM their weights back, which they have dropped after packing."""
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    initialize_layerwise_reload(model)


def finish_reload(model: nn.Module, model_config: Any) -> None:
    """Pack the loaded weights. Where the head shares the embedding's weights, vLLM itself leaves it packed as it was:
    it then answers by the model's old weights, and nothing says so.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    finalize_layerwise_reload(model, model_config)
    for layer in model.modules():
        if isinstance(layer, VocabParallelEmbedding) and hasattr(layer, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(layer, remove_weight=False)


class GlooClient(VLLMClient):
    """TRL's client, with weights over gloo. A server that has gone is an error at once: TRL tries for a minute."""

    def __init__(self, **named: Any) -> None:
        super().__init__(**named)
        self.session.mount("http://", requests.adapters.HTTPAdapter(pool_maxsize=64))

    def _post(self, url: str, **named: Any) -> Any:
        try:
            return super()._post(url, **named)
        except requests.RequestException as error:
            what = f"the generation server at {self.base_url} does not answer any more ({type(error).__name__})"
            raise RunError(what, where=WHERE, fix="look at its log, then `make resume`") from error

    communicator: Group | None

    def init_communicator(self, device: Any = 0) -> None:
        """Meet the server's workers. Raise MachineError where the server has another way for weights."""
        config = self.get_server_info()["weight_transfer_config"] or {}
        if config.get("backend") != GLOO:
            what = f"the server at {self.base_url} has no {GLOO} engine, by which a machine without a GPU sends weights"
            raise MachineError(what, where="grpo.vllm.url", fix="start it as docs/grpo.md says (vLLM on a CPU)")
        target = urlsplit(self.base_url)
        address = own_address(target.hostname or "", target.port or 80)
        port = free_port(0) if self.group_port == GROUP_PORT else self.group_port
        world_size = 1 + self.get_world_size()
        meeting = {"master_address": address, "master_port": port, "rank_offset": 1, "world_size": world_size}
        with ThreadPoolExecutor(1) as threads:  # the server meets this process while it answers
            joined = threads.submit(
                self._post, f"{self.base_url}/init_weight_transfer_engine", json={"init_info": meeting}
            )
            self.communicator = Group(address, port, rank=0, world_size=world_size)
            joined.result()

    def close_communicator(self) -> None:
        """Leave the group."""
        self.communicator = None

    def _start_weight_update(self) -> None:
        try:
            super()._start_weight_update()
        except Exception:  # noqa: BLE001 - TRL raises a plain one for any answer but 200, and vLLM gives no reason
            # vLLM refuses while an update is open, as a trainer leaves it that was killed, and closes the connection.
            self.session.close()
            self._finish_weight_update()  # of a server that has gone it says so
            super()._start_weight_update()

    def update_named_params(
        self, metadata: Sequence[tuple[str, str, list[int]]], named_params: Iterator[tuple[str, Tensor]]
    ) -> None:
        """Announce the tensors, and send them while the server waits for them."""
        names, dtypes, shapes = (list(part) for part in zip(*metadata, strict=True))
        announced = {"names": names, "dtype_names": dtypes, "shapes": shapes}
        self._start_weight_update()
        with ThreadPoolExecutor(1) as threads:
            received = threads.submit(self._post, f"{self.base_url}/update_weights", json={"update_info": announced})
            assert self.communicator is not None
            try:
                for _, weight in named_params:
                    self.communicator.broadcast(weight.detach().contiguous())
            except RuntimeError as error:
                what = f"the generation server at {self.base_url} was lost while it got weights"
                raise RunError(what, where=WHERE, fix="look at its log, then `make resume`") from error
            received.result()
        self._finish_weight_update()


def load_into(llm: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Load the weights into vLLM in this process, and forget the keys and values of older ones."""
    runner = llm.llm_engine.model_executor.driver_worker.model_runner
    begin_reload(runner.model)
    runner.model.load_weights(weights)
    finish_reload(runner.model, llm.llm_engine.vllm_config.model_config)
    llm.reset_prefix_cache()
