"""Stands in for unsloth where a test is about what the kit asks of it and does about its answers.

Importing the real one would change transformers, PEFT and TRL for every test that follows.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig


class FastLanguageModel:
    """Opens and adapts with the plain libraries, by unsloth's names of things; remembers what it was asked for."""

    def __init__(self, *, ignores_4_bits: bool = False, adapts: list[str] | None = None) -> None:
        self.ignores_4_bits, self.adapts = ignores_4_bits, adapts
        self.opened: dict[str, Any] = {}
        self.adapted: dict[str, Any] = {}

    def from_pretrained(self, **options: Any) -> tuple[Any, None]:
        self.opened = dict(options)
        in_4_bits = options["load_in_4bit"] and not self.ignores_4_bits
        quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4") if in_4_bits else None
        model = AutoModelForCausalLM.from_pretrained(
            options["model_name"], dtype=options["dtype"], quantization_config=quantization
        )
        return model, None

    def get_peft_model(self, model: Any, **options: Any) -> Any:
        self.adapted = dict(options)
        known = ("r", "lora_alpha", "lora_dropout", "modules_to_save", "use_rslora", "use_dora", "bias")
        targets = self.adapts or options["target_modules"]
        config = LoraConfig(**{key: options[key] for key in known}, target_modules=targets, task_type="CAUSAL_LM")
        return get_peft_model(model, config)


def as_module(stand_in: FastLanguageModel) -> ModuleType:
    """A module that can be put at `sys.modules["unsloth"]`."""
    module = ModuleType("unsloth")
    module.FastLanguageModel = stand_in  # type: ignore[attr-defined]
    return module
