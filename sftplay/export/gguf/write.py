"""Write one GGUF file of a model, each tensor in its number format: never more than one is held a second time.

The mixtures are those of llama.cpp (`src/llama-quant.cpp`, `llama_tensor_get_type`). Formats of blocks of 256 values,
the K-quants, are rounded by llama.cpp's own code, which the package xllamacpp brings; others by the package `gguf`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import LlamaFileType

from sftplay.errors import ConfigError, RunError, suggest
from sftplay.export.gguf.families import add_hyperparameters, find_family, list_tensors
from sftplay.export.gguf.vocabulary import Vocabulary, add_vocabulary

QUANTS: dict[str, tuple[LlamaFileType, Type, Type]] = {
    "f32": (LlamaFileType.ALL_F32, Type.F32, Type.F32),
    "f16": (LlamaFileType.MOSTLY_F16, Type.F16, Type.F16),
    "bf16": (LlamaFileType.MOSTLY_BF16, Type.BF16, Type.BF16),
    "q8_0": (LlamaFileType.MOSTLY_Q8_0, Type.Q8_0, Type.Q8_0),
    "q6_k": (LlamaFileType.MOSTLY_Q6_K, Type.Q6_K, Type.Q6_K),
    "q5_k_m": (LlamaFileType.MOSTLY_Q5_K_M, Type.Q5_K, Type.Q6_K),
    "q4_k_m": (LlamaFileType.MOSTLY_Q4_K_M, Type.Q4_K, Type.Q6_K),
}
"""Name -> llama.cpp's number of the mixture, the usual format, and that of the tensors that matter most."""

_K_QUANTS = (Type.Q4_K, Type.Q5_K, Type.Q6_K)
_NARROW = {Type.Q4_K: Type.Q5_0, Type.Q5_K: Type.Q5_1, Type.Q6_K: Type.Q8_0}
"""What llama.cpp takes where a row is not a multiple of 256 values."""


def check_quants(names: Sequence[str]) -> None:
    """Raise ConfigError for a mixture that is not written here."""
    for name in names:
        if name not in QUANTS:
            fix, near = suggest(name, QUANTS, "choose one of these")
            what = f"{name!r} is not written here; there are {', '.join(QUANTS)}"
            raise ConfigError(
                what, where="--quant", fix=f"{fix} (llama-quantize makes others of the f16 file)", nearest=near
            )


def choose_type(name: str, shape: tuple[int, ...], quant: str, *, layers: int, is_tied: bool) -> Type:
    """Return the format of the tensor `name`: vectors, norms and the router of experts stay in fp32."""
    _, usual, better = QUANTS[quant]
    if len(shape) == 1 or name.endswith("norm.weight") or "ffn_gate_inp" in name:
        return Type.F32
    chosen = usual
    if usual in _K_QUANTS:
        is_head = name == "output.weight" or (is_tied and name == "token_embd.weight")
        if is_head:
            chosen = Type.Q6_K
        elif name.startswith("blk.") and ("attn_v." in name or "ffn_down" in name):
            chosen = better if uses_more_bits(int(name.split(".")[1]), layers) else usual
        if shape[-1] % 256:
            chosen = Type.Q8_0 if is_head else _NARROW[chosen]
    if chosen not in (Type.F32, Type.F16, Type.BF16) and shape[-1] % 32:
        return Type.F16
    return chosen


def uses_more_bits(layer: int, layers: int) -> bool:
    """Tell whether a layer is among the first and last eighth, or each third between them."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def count_bytes(shape: tuple[int, ...], kind: Type) -> int:
    """Return the bytes of a tensor in this format."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return int(np.prod(shape)) // block * size


def quantize(values: np.ndarray[Any, Any], kind: Type, *, name: str) -> np.ndarray[Any, Any]:
    """Return fp32 values in the format. Raise RunError where one is not finite in it."""
    largest = float(np.abs(values).max())
    if not largest <= float(np.finfo(np.float16 if kind == Type.F16 else np.float32).max):
        what = f"{name} has values that {kind.name} cannot hold (up to {largest:g})"
        raise RunError(what, where="--quant", fix="look for values that are not finite, or take bf16 instead of f16")
    return _quantize_blocks(values, kind) if kind in _K_QUANTS else gguf.quants.quantize(values, kind)


def _quantize_blocks(values: np.ndarray[Any, Any], kind: Type) -> np.ndarray[Any, Any]:
    rows, width = int(np.prod(values.shape[:-1])), values.shape[-1]
    source = np.ascontiguousarray(values, dtype=np.float32)
    done = np.empty((*values.shape[:-1], count_bytes((width,), kind)), dtype=np.uint8)
    written = _ggml().ggml_quantize_chunk(
        int(kind), source.ctypes.data_as(ctypes.c_void_p), done.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_int64(0), ctypes.c_int64(rows), ctypes.c_int64(width), None,
    )  # fmt: skip
    assert written == done.nbytes
    return done


@cache
def _ggml() -> ctypes.CDLL:
    """Open llama.cpp's library inside xllamacpp: `size_t ggml_quantize_chunk(type, src, dst, start, nrows, n_per_row,
    imatrix)` of ggml.h is exported there, xllamacpp's Python module does not show it."""
    spec = find_spec("xllamacpp")
    assert spec is not None
    assert spec.origin is not None
    library = ctypes.CDLL(str(next(Path(spec.origin).parent.glob("xllamacpp*.so"))))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    return library


def list_types(model: Any, quant: str) -> list[tuple[str, tuple[int, ...], Type]]:
    """Return name, shape and number format of each tensor of the file."""
    tensors = list(list_tensors(model, find_family(model)))
    is_tied = all(name != "output.weight" for name, _, _ in tensors)
    layers = model.config.num_hidden_layers
    return [
        (name, shape, choose_type(name, shape, quant, layers=layers, is_tied=is_tied)) for name, shape, _ in tensors
    ]


def file_bytes(model: Any, quant: str) -> int:
    """Return the bytes of the file's weights."""
    return sum(count_bytes(shape, kind) for _, shape, kind in list_types(model, quant))


def write_gguf(model: Any, vocabulary: Vocabulary, path: Path, *, quant: str, name: str) -> None:
    """Write the file. Raise ConfigError for a model that is not known, RunError for values that do not fit."""
    family = find_family(model)
    writer = gguf.GGUFWriter(path, family.arch)
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name)
    writer.add_file_type(QUANTS[quant][0])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_hyperparameters(writer, model.config, family)
    add_vocabulary(writer, vocabulary)
    kinds = list_types(model, quant)
    for tensor, shape, kind in kinds:
        # With another dtype than uint8 the shape is that of the values, not of the bytes.
        writer.add_tensor_info(tensor, shape, np.dtype(np.float32), count_bytes(shape, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for (tensor, _, make), (_, _, kind) in zip(list_tensors(model, family), kinds, strict=True):
        writer.write_tensor_data(quantize(make().numpy(), kind, name=tensor))
    writer.close()
