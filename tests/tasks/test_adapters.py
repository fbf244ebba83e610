"""What DoRA and NEFTune start from, next to the formulas of their papers."""

from __future__ import annotations

from pathlib import Path

import torch
from in_process import Inputs, built
from torch.nn import functional


def test_the_magnitudes_of_dora_start_as_the_length_of_each_row_and_train(inputs: Inputs, tmp_path: Path):
    parameters = dict(built(tmp_path, inputs, tuning__lora__dora=True).trainer.model.named_parameters())
    magnitudes = {name: value for name, value in parameters.items() if "magnitude" in name}
    assert len(magnitudes) == 14
    for name, magnitude in magnitudes.items():
        weight = parameters[name.split(".lora_magnitude")[0] + ".base_layer.weight"]
        assert magnitude.requires_grad
        torch.testing.assert_close(magnitude, weight.norm(dim=1))  # Liu et al. 2024, eq. 5


def test_neftune_adds_noise_of_the_published_size(inputs: Inputs, tmp_path: Path):
    trainer = built(tmp_path, inputs, train__neftune_alpha=5.0, train__max_steps=1, tuning__mode="full").trainer
    embedding, ids, embedded = trainer.model.get_input_embeddings(), [], []
    embedding.register_forward_pre_hook(lambda _module, args: ids.append(args[0]))
    trainer.model.model.layers[0].register_forward_pre_hook(lambda _module, args: embedded.append(args[0].detach()))
    plain = embedding.weight.detach().clone()
    trainer.train()
    noise = (embedded[0] - functional.embedding(ids[0], plain)).abs()
    bound = 5.0 / noise[0].numel() ** 0.5  # Jain et al. 2023: uniform within alpha / sqrt(tokens * width)
    assert 0.9 * bound < float(noise.max()) <= bound * 1.001
