"""Write one GGUF file of a model, tensor by tensor: never more than one is held a second time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from sftplay.export.gguf.families import add_hyperparameters, find_family, list_tensors
from sftplay.export.gguf.quantize import QUANTS, choose_type, count_bytes, quantize
from sftplay.export.gguf.vocabulary import Vocabulary, add_vocabulary


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
