"""A config of another kit, imported and trained, is that kit's run: the same losses and rates as a plain script has.

The script below takes its settings from the sources of the kits, which each case names. Its losses were compared with
those of the kits themselves by hand (docs/evidence.md). A step is all rows, so their order plays no part.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from run_outputs import Outputs
from small_run import WORDS
from torch.nn import functional

pytestmark = pytest.mark.slow

STEPS, ROWS = 3, 8
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|eot_id|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
"""That of Llama 3, which all five kits know, with the marks that TRL's assistant_only_loss needs."""


@dataclass(frozen=True, kw_only=True)
class Plain:
    """The settings of a kit's run."""

    rate: float
    schedule: Callable[[float], float]
    weight_decay: float
    betas: tuple[float, float] = (0.9, 0.999)
    lora: tuple[int, int, list[str] | str] | None = None  # r, alpha, layers
    seed: int = 42


def cosine(share: float) -> float:
    return (1 + math.cos(math.pi * share)) / 2


LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

CASES: dict[str, tuple[dict[str, Any], Plain]] = {
    # axolotl 0.19.0, core/builders/base.py: cosine, AdamW without decay of norms, full without `adapter`.
    "axolotl": (
        {
            "base_model": "MODEL", "datasets": [{"path": "ROWS/rows.jsonl", "type": "chat_template"}],
            "chat_template": "tokenizer_default", "sequence_len": 128, "micro_batch_size": ROWS,
            "gradient_accumulation_steps": 1, "num_epochs": STEPS, "learning_rate": 0.001, "optimizer": "adamw_torch",
            "weight_decay": 0.1, "warmup_steps": 0, "bf16": False, "fp16": False, "output_dir": "OUT",
        },
        Plain(rate=0.001, schedule=cosine, weight_decay=0.1),
    ),
    # LLaMA-Factory 0.9.5, hparams/finetuning_args.py: r 8, alpha 2 r, every linear layer; transformers' linear
    # schedule, no decay, in fp32 unless told otherwise.
    "llamafactory": (
        {
            "model_name_or_path": "MODEL", "stage": "sft", "do_train": True, "finetuning_type": "lora",
            "lora_target": "all", "dataset_dir": "ROWS", "dataset": "rows", "template": "llama3", "cutoff_len": 128,
            "per_device_train_batch_size": 1, "gradient_accumulation_steps": ROWS, "learning_rate": 0.01,
            "num_train_epochs": float(STEPS), "output_dir": "OUT",
        },
        Plain(rate=0.01, schedule=lambda share: 1 - share, weight_decay=0.0, lora=(8, 16, LINEAR)),
    ),
    # ms-swift 4.6.0, trainers/arguments.py and arguments/tuner_args.py: cosine, decay 0.1, beta2 0.95, r 8, alpha 32,
    # every linear layer. fp16 is its default where the weights are fp32.
    "swift": (
        {
            "model": "MODEL", "model_type": "llama", "template": "llama3", "torch_dtype": "float32", "fp16": False,
            "bf16": False, "dataset": "ROWS/rows.jsonl", "lora_dropout": 0.0, "max_length": 128,
            "num_train_epochs": STEPS, "per_device_train_batch_size": 2, "gradient_accumulation_steps": ROWS // 2,
            "learning_rate": "1e-2", "output_dir": "OUT",
        },
        Plain(rate=0.01, schedule=cosine, weight_decay=0.1, betas=(0.9, 0.95), lora=(8, 32, LINEAR)),
    ),
    # TRL 1.16.0, trainer/model_config.py and peft: r 16, alpha 32, q_proj and v_proj; transformers' linear schedule.
    "trl": (
        {
            "model_name_or_path": "MODEL", "dataset_name": "ROWS/rows.jsonl", "use_peft": True, "lora_dropout": 0.0,
            "assistant_only_loss": True, "num_train_epochs": STEPS, "learning_rate": 0.01, "bf16": False,
            "output_dir": "OUT",
        },
        Plain(rate=0.01, schedule=lambda share: 1 - share, weight_decay=0.0, lora=(16, 32, ["q_proj", "v_proj"])),
    ),
    # verl 0.9.1, trainer/config/optim/fsdp.yaml and model/hf_model.yaml: a constant rate of 1e-3, decay 0.01, seed 1,
    # alpha 16, every linear layer; the mean over the tokens of a batch (workers/utils/losses.py).
    "verl": (
        {
            "data": {"train_files": "ROWS/rows.parquet", "train_batch_size": ROWS, "max_length": 128},
            "model": {"path": "MODEL", "lora_rank": 4}, "engine": {"mixed_precision": {"param_dtype": "fp32"}},
            "trainer": {"total_epochs": STEPS, "default_local_dir": "OUT", "logger": ["console"]},
        },
        Plain(rate=0.001, schedule=lambda _: 1.0, weight_decay=0.01, lora=(4, 16, LINEAR), seed=1),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama (`model`), a chat template of Llama 3, and rows as each kit wants them."""
    from datasets import Dataset
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder, rng = tmp_path_factory.mktemp("same-run"), random.Random(0)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=letters, show_progress=False)
    tokenizer.train_from_iterator((" ".join(rng.choices(WORDS, k=12)) for _ in range(300)), trainer)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=400, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=4,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<|begin_of_text|>", eos_token="<|eot_id|>",
        chat_template=TEMPLATE,
    ).save_pretrained(folder / "model")  # fmt: skip
    rows = [
        {"messages": [{"role": "user", "content": f"{number} " + " ".join(rng.choices(WORDS, k=6))},
                      {"role": "assistant", "content": " ".join(rng.choices(WORDS, k=rng.choice([1, 3, 9])))}]}
        for number in range(ROWS)
    ]  # fmt: skip
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Dataset.from_list(rows).to_parquet(folder / "rows.parquet")
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    info = {"file_name": "rows.jsonl", "formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": tags}
    (folder / "dataset_info.json").write_text(json.dumps({"rows": info}))
    return folder


def train_plain(folder: Path, plain: Plain) -> list[tuple[float, float]]:
    """The loss of each step, and its rate: one row after the other, the mean over all tokens of all answers."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

    set_seed(plain.seed)
    model, tokenizer = (kind.from_pretrained(folder / "model") for kind in (AutoModelForCausalLM, AutoTokenizer))
    if plain.lora:
        r, alpha, layers = plain.lora
        model = get_peft_model(model, LoraConfig(r=r, lora_alpha=alpha, target_modules=layers, task_type="CAUSAL_LM"))
    named = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    groups = [
        {"params": [weight for name, weight in named if "norm" not in name], "weight_decay": plain.weight_decay},
        {"params": [weight for name, weight in named if "norm" in name], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=plain.rate, betas=plain.betas)
    rows = []
    for line in (folder / "rows.jsonl").read_text().splitlines():
        question, answer = (turn["content"] for turn in json.loads(line)["messages"])
        head = "<|start_header_id|>{}<|end_header_id|>\n\n"
        prompt = f"<|begin_of_text|>{head.format('user')}{question}<|eot_id|>{head.format('assistant')}"
        read, learned = (
            tokenizer(text, add_special_tokens=False).input_ids for text in (prompt, f"{answer}<|eot_id|>")
        )
        rows.append((torch.tensor([read + learned]), torch.tensor([-100] * len(read) + learned)))
    n_learned = sum(int((labels != -100).sum()) for _, labels in rows)
    told = []
    for step in range(STEPS):
        rate = plain.rate * plain.schedule(step / STEPS)
        for group in optimizer.param_groups:
            group["lr"] = rate
        total = 0.0
        for ids, labels in rows:
            scores = model(input_ids=ids).logits[0, :-1]
            loss = functional.cross_entropy(scores, labels[1:], ignore_index=-100, reduction="sum") / n_learned
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_([weight for _, weight in named], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        told.append((total, rate))
    return told


def write_foreign(folder: Path, home: Path, kit: str) -> Path:
    places = {"MODEL": str(folder / "model"), "ROWS": str(folder), "OUT": str(home / "outputs")}
    text = yaml.safe_dump(CASES[kit][0], sort_keys=False)
    for name, place in places.items():
        text = text.replace(name, place)
    target = home / f"{kit}.yaml"
    target.write_text(text)
    return target


@pytest.mark.parametrize("kit", CASES)
def test_an_imported_config_trains_as_its_kit_does(
    kit: str, material: Path, tmp_path: Path, sftplay: Callable[..., Any], capsys: pytest.CaptureFixture[str]
):
    ours = tmp_path / "run.yaml"
    done = sftplay("import-config", "--in", write_foreign(material, tmp_path, kit), "--out", ours, "--json")
    answer = json.loads(done.stdout)
    assert (answer["kind"], answer["validates"]) == (kit, True), done.stdout + done.stderr
    own = ("run_name=run", "logging.steps=1", "logging.backend=none", f"data.processed_dir={tmp_path / 'processed'}")
    assert sftplay("train", "--config", ours, *own).returncode == 0
    lines = Outputs(tmp_path).metrics("run")
    plain = train_plain(material, CASES[kit][1])
    with capsys.disabled():
        for (loss, rate), line in zip(plain, lines, strict=True):
            print(
                f"\n{kit:<14} step {line['step']}  here {line['loss']:.6f}  plain {loss:.6f}  rate {rate:.6f}", end=""
            )
    # Without its decay, or with another beta2, a loss of ms-swift's third step moves by 1e-5; rounding by 3e-7.
    assert [line["loss"] for line in lines] == pytest.approx([loss for loss, _ in plain], rel=3e-6)
    assert [line["learning_rate"] for line in lines] == pytest.approx([rate for _, rate in plain], rel=1e-6)


def test_the_settings_of_one_kit_are_not_those_of_another(material: Path):
    losses = {kit: [loss for loss, _ in train_plain(material, plain)] for kit, (_, plain) in CASES.items()}
    for kit, found in losses.items():
        others = [other[1:] for name, other in losses.items() if name != kit]
        assert all(abs(found[1] / other[0] - 1) > 1e-4 for other in others), (kit, losses)
