"""Every key of the config does something: a check of what a trainer or a model really used, or the file that shows it.

Most keys are checked on two runs, built up to their first step, which differ in all of them at once; the values are
chosen so that none can be taken for another's effect.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hrm_keys import OF_HRM
from in_process import Finished, Inputs, built, sized, written_config
from patience import PATIENT_BOX
from preference_keys import OF_PREFERENCE, OF_REWARD_MODEL
from processes import HANG_S
from score_keys import OF_SCORE
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig

from sftplay.config.keys import all_keys, differences, values_that_decide_weights
from sftplay.config.load import load_config
from sftplay.config.run import RunConfig
from sftplay.data.mixture.load import MixtureRows, load_mixture
from sftplay.data.pipeline import training_order
from sftplay.errors import DataError
from sftplay.evaluate.perplexity import Document, HeldOut, measure_sources
from sftplay.launch.command import Launch, Scale
from sftplay.launch.follow import read_timeout
from sftplay.launch.nccl import nccl_environment
from sftplay.launch.run_folder import RunFolder, new_folder
from sftplay.machine.gpu import Gpu, Machine
from sftplay.machine.probe import probe
from sftplay.model.recomputation import recomputation_arguments
from sftplay.plan.sizing import size_run
from sftplay.reward.reward_set import RewardSet
from sftplay.runs import memory_probe
from sftplay.runs.inputs import known_shape
from sftplay.runs.strategy_setup import build_strategy_environment, prepare_deepspeed, with_deepspeed
from sftplay.tasks.grpo.task import grpo_arguments
from sftplay.tasks.grpo.vllm_server import server_command
from sftplay.train.checkpointing import MarkComplete
from sftplay.train.train_run import make_setup

CHANGES: dict[str, Any] = {
    "seed": 7,
    "model.max_seq_len": 40,
    "model.attn": "eager",
    "tuning.lora.r": 3,
    "tuning.lora.alpha": 12.0,
    "tuning.lora.dropout": 0.25,
    "tuning.lora.target_modules": ["q_proj", "down_proj"],
    "tuning.lora.modules_to_save": ["embed_tokens"],
    "tuning.lora.dora": True,
    "tuning.lora.rslora": True,
    "train.max_steps": 6,
    "train.learning_rate": 0.5,
    "train.lr_scheduler": "linear",
    "train.warmup_ratio": 0.5,
    "train.weight_decay": 0.3,
    "train.max_grad_norm": 0.7,
    "train.effective_batch_size": 12,
    "train.batch_size": 3,
    "train.gradient_checkpointing": True,
    "train.packing": True,
    "train.probe": "off",
    "train.loss_head": "chunked",
    "train.optim": "sgd",
    "train.neftune_alpha": 5.0,
    "train.eval_steps": 2,
    "train.save_steps": 4,
    "train.save_total_limit": 5,
    "train.best_metric": "loss",
    "train.early_stopping": 3,
    "train.dataloader_num_workers": 1,
    "train.dataloader_pin_memory": True,
    "train.extra": {"torch_empty_cache_steps": 9},
    "logging.backend": ["tensorboard"],
    "logging.steps": 3,
    "logging.row_ids": False,
}
"""What the changed run of the pair has; the plain one has the defaults of `in_process.written_config`."""


@dataclass
class Bench:
    """The pair of runs, and the means to build others."""

    home: Path
    inputs: Inputs
    plain: Finished
    changed: Finished
    made: dict[str, Finished] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def rows(self, name: str, rows: list[Any]) -> str:
        path = self.home / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    def build(self, **changes: Any) -> Finished:
        """A run built up to its first step; the same changes give the same run, and none the plain one."""
        plain = self.plain.cfg
        changes = {key: value for key, value in changes.items() if plain.get_value(key.replace("__", ".")) != value}
        if not changes:
            return self.plain
        name = json.dumps(changes, sort_keys=True)
        if name not in self.made:
            self.made[name] = built(self.home / f"built-{next(self.numbers)}", self.inputs, **changes)
        return self.made[name]


Check = Callable[[Bench], None]


def pair(look: Callable[[Finished], Any], before: Any, after: Any) -> Check:
    """`look` sees `before` in the plain run and `after` in the changed one."""

    def check(bench: Bench) -> None:
        assert look(bench.plain) == before
        assert look(bench.changed) == after

    return check


def each(key: str, look: Callable[[Finished], Any], expected: dict[Any, Any], others: Any = None) -> Check:
    """`look` sees what `expected` says for each value of `key`, in runs of their own with the keys of `others`."""

    def check(bench: Bench) -> None:
        assert len(set(map(str, expected.values()))) > 1
        for value, seen in expected.items():
            assert look(bench.build(**{key.replace(".", "__"): value}, **(others or {}))) == seen, value

    return check


def arg(name: str) -> Callable[[Finished], Any]:
    return lambda run: getattr(run.trainer.args, name)


def adapted(run: Finished) -> Any:
    """The first layer with a pair."""
    return next(module for module in run.trainer.model.modules() if hasattr(module, "lora_A"))


def adapted_names(run: Finished) -> set[str]:
    named = run.trainer.model.named_modules()
    return {name.rsplit(".", 1)[-1] for name, module in named if hasattr(module, "lora_A")}


def rates(run: Finished) -> list[float]:
    """The shape of the learning rate over the steps, from the scheduler the trainer makes."""
    trainer, steps = run.trainer, run.trainer.args.max_steps
    trainer.create_optimizer_and_scheduler(steps)
    shape = trainer.lr_scheduler.lr_lambdas[0]
    return [round(shape(step), 6) for step in range(steps)]


def group(run: Finished) -> dict[str, Any]:
    run.trainer.create_optimizer_and_scheduler(run.trainer.args.max_steps)
    return run.trainer.optimizer.param_groups[0]


def window(run: Finished) -> dict[str, torch.Tensor]:
    return next(iter(torch.utils.data.DataLoader(
        run.trainer.train_dataset, run.trainer.args.per_device_train_batch_size, collate_fn=run.trainer.data_collator
    )))  # fmt: skip


def micro_batches(run: Finished) -> list[dict[str, torch.Tensor]]:
    return list(run.trainer.micro_batcher.cut(window(run)))


def largest_micro_batch(run: Finished) -> int:
    return max(len(micro_batch["input_ids"]) for micro_batch in micro_batches(run))


def callback(run: Finished, kind: str) -> Any:
    found = [each for each in run.trainer.callback_handler.callbacks if type(each).__name__ == kind]
    return found[0] if found else None


def patience(run: Finished) -> int | None:
    found = callback(run, "StopWithoutProgress")
    return found and found.early_stopping_patience


def longest(run: Finished) -> int:
    return max(map(len, run.trainer.train_dataset["input_ids"]))


def cosine(steps: int) -> list[float]:
    return [round(0.5 * (1 + math.cos(math.pi * step / steps)), 6) for step in range(steps)]


def four_bit_weight(run: Finished) -> Any:
    return next(p for p in run.trainer.model.parameters() if p.dtype == torch.uint8)


def kind_of_training(run: Finished) -> tuple[bool, bool]:
    parameters = list(run.trainer.model.parameters())
    return any(not p.requires_grad for p in parameters), any(p.dtype == torch.uint8 for p in parameters)


def check_place(bench: Bench) -> None:
    config = str(written_config(bench.home / "place", bench.inputs, run_name="mine", output_dir="elsewhere"))
    assert new_folder(sized(Path(config)), config).path == Path("elsewhere") / "mine"
    config = str(written_config(bench.home / "place", bench.inputs, run_name="yours", output_dir="here"))
    assert new_folder(sized(Path(config)), config).path == Path("here") / "yours"


def check_seed(bench: Bench) -> None:
    for run, seed in ((bench.plain, 42), (bench.changed, 7)):
        assert run.trainer.train_dataset["row"][:20] == training_order(70, 20, seed=seed)
    one, other, again = (bench.build(seed=seed, logging__steps=steps) for seed, steps in ((1, 7), (2, 7), (1, 8)))
    assert not torch.equal(adapted(one).lora_A["default"].weight, adapted(other).lora_A["default"].weight)
    assert torch.equal(adapted(one).lora_A["default"].weight, adapted(again).lora_A["default"].weight)


def steps_and_rows(run: Finished) -> tuple[int, int]:
    return run.trainer.args.max_steps, len(run.trainer.train_dataset)


def pins_memory(run: Finished) -> bool:
    # What the library is told: transformers itself switches it off where there is no GPU.
    return make_setup(run.cfg, run.folder, n_rows=70).arguments(has_held_out=True)["dataloader_pin_memory"]


def precision_of(run: Finished) -> tuple[str, torch.dtype]:
    norm = next(p for name, p in run.trainer.model.named_parameters() if "norm" in name)
    return run.trainer.args.bf16, norm.dtype


def check_model_name(bench: Bench) -> None:
    other = bench.home / "other-model"
    model = AutoModelForCausalLM.from_pretrained(bench.inputs.model)
    with torch.no_grad():
        model.model.norm.weight.fill_(0.125)
    model.save_pretrained(other)
    AutoTokenizer.from_pretrained(bench.inputs.model).save_pretrained(other)
    norms = [
        float(bench.build(model__name=str(name)).trainer.model.get_base_model().model.norm.weight[0].detach())
        for name in (bench.inputs.model, other)
    ]
    assert norms == [1.0, 0.125]


def what_libraries_are_told(bench: Bench, name: str, **changes: Any) -> list[Any]:
    """The keyword `name` in every call that opens a model or a tokenizer."""
    told: list[Any] = []

    def spy(real: Any) -> Any:
        def from_pretrained(*args: Any, **options: Any) -> Any:
            told.append(options.get(name))
            return real(*args, **options)

        return from_pretrained

    with (
        patch.object(AutoModelForCausalLM, "from_pretrained", spy(AutoModelForCausalLM.from_pretrained)),
        patch.object(AutoTokenizer, "from_pretrained", spy(AutoTokenizer.from_pretrained)),
    ):
        built(bench.home / f"told-{name}-{len(changes)}", bench.inputs, **changes)
    assert len(told) == 2
    return told


def told(name: str, key: str, value: Any, before: list[Any], after: list[Any]) -> Check:
    """What libraries that open tokenizer and model are told without the key and with it."""

    def check(bench: Bench) -> None:
        assert what_libraries_are_told(bench, name) == before
        assert what_libraries_are_told(bench, name, **{key.replace(".", "__"): value}) == after

    return check


def chats(count: int, words: str = "stone") -> list[Any]:
    return [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": words}]}
        for n in range(count)
    ]


def first_text(run: Finished) -> str:
    text: str = run.trainer.processing_class.decode(run.trainer.train_dataset[0]["input_ids"])
    return text


def check_format(bench: Bench) -> None:
    rows = [{"instruction": "a", "output": "river", "prompt": "b", "completion": "stone"}] * 4
    path = bench.rows("two-layouts.jsonl", rows)
    tokenizer = bench.plain.trainer.processing_class
    for layout, word in (("alpaca", "river"), ("prompt_completion", "stone")):
        run = bench.build(data__format=layout, data__train_path=path, data__val_path=None, data__split=0)
        text = tokenizer.decode(run.trainer.train_dataset[0]["input_ids"])
        assert [word in text, len(text) > 20] == [True, True]


def check_encoding(bench: Bench) -> None:
    path = bench.home / "encoding.jsonl"
    path.write_bytes(b'{"question": "why", "answer": "\xe9"}\n' * 4)
    # Byte E9 in Python's tables of the two code pages.
    for name, letter in (("cp1252", "é"), ("cp437", "Θ")):
        run = bench.build(data__encoding=name, data__train_path=str(path))
        assert f"{letter}<|im_end|>" in first_text(run)


def check_delimiter(bench: Bench) -> None:
    path = bench.home / "delimiter.csv"
    path.write_text("question|answer\n" + "why, who|river\n" * 4)
    assert "why, who<|im_end|>" in first_text(bench.build(data__delimiter="|", data__train_path=str(path)))
    with pytest.raises(DataError, match=r"delimiter\.csv:2"):
        bench.build(data__delimiter=",", data__train_path=str(path))


def check_template(bench: Bench) -> None:
    own = bench.home / "own.jinja"
    own.write_text(
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}"
        "{% endgeneration %}{% else %}{{ m['role'] + '#' + m['content'] + '#' }}{% endif %}{% endfor %}"
    )
    tokenizer = bench.plain.trainer.processing_class
    for template, start in (("auto", "<|im_start|>"), (str(own), "user#")):
        run = bench.build(data__template=template)
        assert tokenizer.decode(run.trainer.train_dataset[0]["input_ids"]).startswith(start)
        assert run.trainer.processing_class.chat_template.startswith("{% for m in messages %}")


def check_stride(bench: Bench) -> None:
    documents = HeldOut(documents={"domain": [Document([3 + n % 390 for n in range(200)], 200)]})
    strides = {}
    for stride in (None, 100):
        cfg = bench.plain.cfg.with_values({"eval.stride": stride}, "test")
        path = bench.home / f"stride-{stride}" / "after.json"
        trainer = bench.plain.trainer
        found = measure_sources(trainer.model, documents, tokenizer=trainer.processing_class, cfg=cfg, path=path)
        strides[found["stride"]] = json.loads(path.read_text())["loss"]
    assert set(strides) == {64, 100}  # the window has 128 tokens
    assert strides[64] != pytest.approx(strides[100], rel=1e-6)


def mixture(bench: Bench, *, others: dict[str, Any] | None = None, **keys: Any) -> MixtureRows:
    """A mixture of six documents and six chats; `others` are keys of its sources, as `domain.weight`."""
    documents = [{"text": f"{n} " + "river stone " * 40} for n in range(6)]
    listed = [
        {"name": "domain", "path": bench.rows("documents.jsonl", documents), "type": "cpt", "split": 0.0},
        {"name": "chat", "path": bench.rows("chats.jsonl", chats(6)), "type": "chat", "split": 0.0},
    ]
    for dotted, value in (others or {}).items():
        name, key = dotted.split(".")
        next(entry for entry in listed if entry["name"] == name)[key] = value
    given = {"task_mode": "cpt_mixed", "datasets": listed, "data__train_path": None, "data__val_path": None}
    home = bench.home / f"mixture-{next(bench.numbers)}"
    cfg = load_config(written_config(home, bench.inputs, **given, **{"train__max_steps": None, **keys}))
    return load_mixture(cfg, AutoTokenizer.from_pretrained(bench.inputs.model))


def check_sources(bench: Bench) -> None:
    plain = mixture(bench)
    assert [source.name for source in plain.sources] == ["domain", "chat"]
    named = mixture(bench, others={"chat.path": bench.rows("two.jsonl", chats(2)), "chat.name": "talk"})
    assert [source.name for source in named.sources] == ["domain", "talk"]
    assert [each.report["sources"][name]["documents"] for each, name in ((plain, "chat"), (named, "talk"))] == [6, 2]


def check_type(bench: Bench) -> None:
    texts = bench.rows("texts.jsonl", [{"text": "river stone"}])
    kinds = [mixture(bench, others=each).sources[1].kind for each in ({}, {"chat.type": "cpt", "chat.path": texts})]
    assert kinds == ["chat", "cpt"]


def check_held_out(bench: Bench) -> None:
    held_out = {}
    for key, value in (("split", 0.3), ("val_path", bench.rows("val.jsonl", [{"text": "a"}] * 3))):
        found = mixture(bench, others={"domain.split": None, f"domain.{key}": value})
        held_out[key] = found.report["sources"]["domain"]["held_out"]["documents"]
    assert held_out["val_path"] == 3
    assert held_out["split"] not in (0, 3)


def check_ddp_keys(bench: Bench) -> None:
    """Two ranks that really use them are in tests/train/test_gradient_sync.py."""
    names = ("ddp_bucket_cap_mb", "ddp_static_graph")
    with patch.dict("os.environ", {"WORLD_SIZE": "2"}):
        for comm, expected in (({}, [None, False]), ({"bucket_cap_mb": 7, "static_graph": True}, [7, True])):
            values = {f"cluster.comm.{key}": value for key, value in comm.items()}
            cfg = bench.plain.cfg.with_values(values, "test")
            arguments = make_setup(cfg, bench.plain.folder, n_rows=70).arguments(has_held_out=True)
            assert [arguments[name] for name in names] == expected


def check_deepspeed(bench: Bench) -> None:
    """A file of the user's reaches the workers, whole and without its comments."""
    given = bench.home / "mine.json"
    given.write_text('{"zero_optimization": {"stage": 3}, "steps_per_print": 7} // mine')
    changes = {"cluster__deepspeed": str(given), "train__batch_size": 2}
    config = written_config(bench.home / "deepspeed", bench.inputs, **changes)
    cfg = size_run(with_deepspeed(load_config(config), is_asked=False), probe(), world_size=2, vocab_size=400).cfg
    assert cfg.cluster.strategy == "zero3"
    folder = RunFolder(bench.home / "deepspeed" / "run")
    folder.create()
    env = build_strategy_environment(cfg, folder, scale=Scale(2), has_gpu=False)
    prepare_deepspeed(cfg, folder, command=Launch(("worker",), env))
    handed = json.loads(Path(env["ACCELERATE_DEEPSPEED_CONFIG_FILE"]).read_text())
    assert (handed["zero_optimization"]["stage"], handed["steps_per_print"]) == (3, 7)
    without = build_strategy_environment(
        cfg.with_values({"cluster.deepspeed": None}, "test"), folder, scale=Scale(2), has_gpu=False
    )
    assert without["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3"


NOTHING = {"points": [], "accumulates": True, "out_of_memory_rows": None, "device": None}


def check_probe(bench: Bench) -> None:
    gpu = Gpu(0, "NVIDIA L4", 24 * 2**30, 23 * 2**30, (8, 9))
    machine = Machine((gpu,), "", 2**34, 2, "3.11", "Linux", {})
    asked = []
    for value in ("off", "auto", "auto", "always"):
        config = written_config(bench.home / "probe", bench.inputs, train__probe=value)
        cfg = load_config(config)
        sized = size_run(cfg, machine, shape=known_shape(cfg))
        place = memory_probe.ProbeTarget(machine, 1, bench.home)
        with patch.object(memory_probe, "CACHE", bench.home / "probes"):
            memory_probe.size_by_probe(
                sized, place, resize=pytest.fail, run=lambda *_, value=value, **__: asked.append(value) or NOTHING
            )
    assert asked == ["auto", "always"]


def check_deadline(bench: Bench) -> None:
    (bench.home / "never.py").write_text("def ends(completions, **_):\n    while True: pass\n")
    never = f"{bench.home}/never.py:ends"
    rewards = [{"name": f"r{n}", "use": never, "deadline": deadline} for n, deadline in enumerate((0.05, 0.1))]
    with RewardSet(RunConfig.model_validate({"model": {"name": "builtin:tiny"}, "rewards": rewards})) as opened:
        found = opened.score(["a"], {}).by_name.values()
    assert [scores.reasons for scores in found] == [["took longer than 0.05 s"], ["took longer than 0.1 s"]]


CODE = {"name": "code", "use": "code_tests", "deadline": HANG_S}


def check_packages(_: Bench) -> None:
    answer, tests = "```python\nimport yaml\ndef f(): return yaml.safe_load('3')\n```", {"tests": [["assert f() == 3"]]}
    for packages, expected in (([], 0.0), (["yaml"], 1.0)):
        content = {
            "model": {"name": "builtin:tiny"}, "rewards": [CODE],
            "sandbox": {**PATIENT_BOX, "executor": "none", "packages": packages},
        }  # fmt: skip
        with RewardSet(RunConfig.model_validate(content)) as opened:
            assert opened.score([answer], tests).by_name["code"].values == [expected]


def check_sandbox(_: Bench) -> None:
    """A program that never ends, and one that takes 200 MiB, with limits that end them and with others."""
    loops, greedy = "def f(x):\n    while True: pass", "def f(x): return x + 0 * len(bytearray(200 << 20))"
    hasty, small = {"timeout": 0.35, "test_timeout": 0.25}, {**PATIENT_BOX, "memory": "128MiB"}
    for program, box, expected in ((loops, hasty, "timeout"), (greedy, PATIENT_BOX, "ok"), (greedy, small, "memory")):
        content = {"model": {"name": "builtin:tiny"}, "rewards": [CODE], "sandbox": {"executor": "none", **box}}
        with RewardSet(RunConfig.model_validate(content)) as opened:
            assert opened.sandbox is not None
            assert opened.executor == "none"
            with patch.object(opened.sandbox, "_judge", wraps=opened.sandbox._judge) as judge:
                scored = opened.score([f"```python\n{program}\n```"], {"tests": [["assert f(1) == 1"]]})
        (asked,) = [call.args[0].limits for call in judge.call_args_list]
        assert (asked.timeout_s, asked.test_timeout_s) == (box["timeout"], box["test_timeout"])
        assert [verdict["per_test"] for verdict in scored.verdicts if verdict] == [[expected]]


NCCL: dict[str, tuple[Any, str, str]] = {
    "socket_ifname": ("lo", "GLOO_SOCKET_IFNAME", "lo"),
    "debug": ("INFO", "NCCL_DEBUG", "INFO"),
    "ib_disable": (True, "NCCL_IB_DISABLE", "1"),
    "ib_hca": ("mlx5_0", "NCCL_IB_HCA", "mlx5_0"),
    "ib_gid_index": (3, "NCCL_IB_GID_INDEX", "3"),
    "p2p_disable": (True, "NCCL_P2P_DISABLE", "1"),
    "shm_disable": (True, "NCCL_SHM_DISABLE", "1"),
    "flight_recorder": (500, "TORCH_FR_BUFFER_SIZE", "500"),
}
"""Key of `cluster.nccl`, a value, and what the workers' environment has for it."""


def check_nccl(bench: Bench) -> None:
    for values in ({}, {f"cluster.nccl.{key}": value for key, (value, _, _) in NCCL.items()}):
        cfg = bench.plain.cfg.with_values(values, "test")
        env = nccl_environment(cfg, bench.plain.folder.logs, has_gpu=True, environ={}, interfaces=["lo"])
        for _, variable, text in NCCL.values():
            assert env.get(variable) == (text if values else None)


def of_trl(key: str, name: str, expected: dict[Any, Any], others: dict[str, Any]) -> Check:
    """The field `name` of TRL's GRPOConfig, for each value of `grpo.KEY` beside other keys of the section."""

    def check(bench: Bench) -> None:
        for value, seen in expected.items():
            values = {f"grpo.{other}": to for other, to in {**others, key: value}.items()}
            cfg = bench.plain.cfg.with_values(values, "test")
            usual = {"use_cpu": True, "bf16": False, **recomputation_arguments(recomputes=False)}
            config = GRPOConfig(str(bench.home), report_to="none", **usual, **grpo_arguments(cfg))
            assert getattr(config, name) == seen, value

    return check


def decides(key: str, value: Any, *, weights: bool, named: str = "") -> Check:
    """Whether a resume with another value is another run, which names `named` or the key itself."""

    def check(bench: Bench) -> None:
        before = bench.plain.cfg.with_values({"task_mode": "grpo"}, "test")
        after = before.with_values({key: value}, "test")
        changed = differences(values_that_decide_weights(before), values_that_decide_weights(after))
        assert [name for name, *_ in changed] == ([named or key] if weights else [])

    return check


def starts_the_server(bench: Bench) -> None:
    cfg = bench.plain.cfg.with_values({"grpo.vllm.command": "serve -p {port} {model}"}, "test")
    assert server_command(cfg, host="h", port=9, has_gpu=True) == ["serve", "-p", "9", cfg.model.name]


def brings_the_server_adapters(bench: Bench) -> None:
    for sync, has_adapters in (("full", False), ("adapter", True)):
        cfg = bench.plain.cfg.with_values({"grpo.vllm.sync": sync}, "test")
        words = server_command(cfg, host="h", port=9, has_gpu=True)
        assert ("--enable-lora" in words, "--weight-transfer-config" in words) == (has_adapters, not has_adapters)


SAME_IN_TRL: dict[str, tuple[Any, ...]] = {
    "num_generations": (2, 4), "max_completion_length": (512, 9), "num_iterations": (1, 2),
    "loss_type": ("dapo", "dr_grpo"), "importance_sampling_level": ("token", "sequence"), "epsilon": (0.2, 0.1),
    "epsilon_high": (None, 0.28), "delta": (None, 4.0), "beta": (0.0, 0.04), "scale_rewards": ("group", "none"),
    "mask_truncated_completions": (False, True), "top_entropy_quantile": (1.0, 0.2), "entropy_coef": (0.0, 0.01),
    "off_policy_mask_threshold": (None, 0.5), "temperature": (1.0, 0.7), "top_p": (1.0, 0.9), "top_k": (0, 20),
    "min_p": (None, 0.1), "repetition_penalty": (1.0, 1.2),
}  # fmt: skip
"""Keys of the section `grpo` that TRL has by the same name, and values of theirs."""

COLOCATED, SERVED = {"generation": "vllm_colocate"}, {"generation": "vllm_server"}
NAMED_IN_TRL: dict[str, tuple[str, dict[Any, Any], dict[str, Any]]] = {
    "max_prompt_length": ("vllm_max_model_length", {30: 50, 12: 32}, {**COLOCATED, "max_completion_length": 20}),
    "steps_per_generation": ("generation_batch_size", {1: 8, 3: 24}, {}),
    "aggregation": (
        "multi_objective_aggregation", {key: key for key in ("sum_then_normalize", "normalize_then_sum")}, {}
    ),
    "generation": ("vllm_mode", {"vllm_server": "server", "vllm_colocate": "colocate"}, {}),
    "vllm.memory_share": ("vllm_gpu_memory_utilization", {0.3: 0.3, 0.5: 0.5}, COLOCATED),
    "vllm.sleep": ("vllm_enable_sleep_mode", {True: True, False: False}, COLOCATED),
    "vllm.tensor_parallel": ("vllm_tensor_parallel_size", {1: 1, 2: 2}, COLOCATED),
    "vllm.url": ("vllm_server_base_url", {"http://a:1": "http://a:1"}, SERVED),
    "vllm.timeout": ("vllm_server_timeout", {240: 240.0, 7: 7.0}, SERVED),
}  # fmt: skip
"""Key -> TRL's field, what it is for each value, and other keys of the section."""

OF_GRPO: dict[str, Check] = {
    **{key: of_trl(key, key, dict(zip(values, values)), {}) for key, values in SAME_IN_TRL.items()},
    **{key: of_trl(key, *row) for key, row in NAMED_IN_TRL.items()},
    "extra": of_trl("extra.sapo_temperature_neg", "sapo_temperature_neg", {1.1: 1.1}, {}),
    "vllm.command": starts_the_server,
    "vllm.sync": brings_the_server_adapters,
    "share_prompts": decides("grpo.share_prompts", False, weights=True),
    "generation_rows": decides("grpo.generation_rows", 2, weights=True),
    "dynamic_sampling_rounds": decides("grpo.dynamic_sampling_rounds", 2, weights=True),
    "skip_zero_variance": decides("grpo.skip_zero_variance", True, weights=True),
    "logprob_check_steps": decides("grpo.logprob_check_steps", 3, weights=False),
    # What they do to the loss: tests/tasks/grpo/test_variants.py.
    "dr_grpo_divisor": decides("grpo.dr_grpo_divisor", 100, weights=True),
    "entropy_mean": of_trl("entropy_mean", "entropy_coef", {"micro_batch": 0.1, "step": 0.0}, {"entropy_coef": 0.1}),
    "sampler_correction": of_trl(
        "sampler_correction",
        "vllm_importance_sampling_correction",
        {"trl": True, "none": False, "token_mask": False},
        COLOCATED,
    ),
    "sampler_ratio_min": decides("grpo.sampler_ratio_min", 0.5, weights=True),
    "sampler_ratio_max": decides("grpo.sampler_ratio_max", 2.0, weights=True),
    "score_centering": decides("grpo.score_centering", 64, weights=True),
    "overlong_buffer": decides("grpo.overlong_buffer", 64, weights=True),
    "stop_without_signal": decides("grpo.stop_without_signal", 5, weights=False),
    "samples": decides("grpo.samples", 4, weights=False),
    "placebo_reward": decides("grpo.placebo_reward", "random", weights=True),
    "environment": decides("grpo.environment", "game.py:make", weights=True),
    "environment_options": decides("grpo.environment_options.size", 5, weights=True),
    "tools": decides("grpo.tools", ["calculator"], weights=True),
    "tool_options": decides(
        "grpo.tool_options.search", {"folder": "pages"}, weights=True, named="grpo.tool_options.search.folder"
    ),
    "max_turns": decides("grpo.max_turns", 3, weights=True),
    "step_deadline": decides("grpo.step_deadline", 3.0, weights=False),
}


EACH: dict[str, tuple[Any, ...]] = {
    "tuning.mode": (kind_of_training, {"full": (False, False), "lora": (True, False), "qlora": (True, True)}),
    "tuning.quant_type": (
        lambda run: four_bit_weight(run).quant_state.quant_type,
        {"nf4": "nf4", "fp4": "fp4"},
        {"tuning__mode": "qlora"},
    ),
    "tuning.double_quant": (
        lambda run: four_bit_weight(run).quant_state.nested,
        {True: True, False: False},
        {"tuning__mode": "qlora"},
    ),
    "train.epochs": (steps_and_rows, {1.0: (9, 72), 2.5: (22, 176), 0.1: (1, 8)}, {"train__max_steps": None}),
    # Of 4 steps: the last 2, by 1 - sqrt(progress), or the last alone. The warmup takes 2, so that 3 are too many.
    "train.decay_ratio": (
        rates,
        {0.25: [0.0, 0.5, 1.0, 1.0], 0.6: [0.0, 0.5, 1.0, round(1 - 0.5**0.5, 6)]},
        {"train__lr_scheduler": "warmup_stable_decay", "train__warmup_ratio": 0.4},
    ),
    "train.min_lr_ratio": (rates, {0.0: cosine(4), 0.1: [round(0.1 + 0.9 * share, 6) for share in cosine(4)]}),
    "train.batch_size": (largest_micro_batch, {8: 8, 2: 2}),
    "train.grad_accum": (lambda run: len(micro_batches(run)), {1: 1, 8: 8}),
    "train.batching": (
        lambda run: largest_micro_batch(run) > 2,
        {"examples": False, "tokens": True},
        {"train__batch_size": 2},
    ),
    # 8 rows a step: four times, and twice, what the rate of 0.01 was found with.
    "train.lr_scaling": (arg("learning_rate"), {"linear": 0.04, "sqrt": 0.02}, {"train__lr_batch_size": 2}),
    "train.lr_batch_size": (arg("learning_rate"), {2: 0.04, 4: 0.02}, {"train__lr_scaling": "linear"}),
    "train.precision": (precision_of, {"fp32": (False, torch.float32), "bf16": (True, torch.bfloat16)}),
    "train.best_metric": (arg("load_best_model_at_end"), {None: False, "loss": True}),
    "train.oom_recovery": (lambda run: run.trainer.replay is not None, {True: True, False: False}),
    "train.stall_timeout": (lambda run: read_timeout(run.folder), {600: 600, 7: 7, 0: 0}),
    "train.time_limit": (lambda run: callback(run, "StopInTime") is not None, {None: False, "90d": True}),
    "train.profile.start": (
        lambda run: callback(run, "ProfileSteps").config.start,
        {2: 2, 3: 3},
        {"train__profile__steps": 1},
    ),
    "train.profile.steps": (
        lambda run: callback(run, "ProfileSteps") is not None,
        {0: False, 2: True},
        {"train__profile__start": 2},
    ),
    "train.profile.memory": (
        lambda run: callback(run, "ProfileSteps").config.memory,
        {True: True, False: False},
        {"train__profile__start": 2, "train__profile__steps": 1},
    ),
    "cluster.strategy": (lambda run: run.cfg.cluster.strategy, {"auto": "ddp", "ddp": "ddp", "zero2": "zero2"}),
    "cluster.timeout": (arg("ddp_timeout"), {1800: 1800, 77: 77}),
    "cluster.price_per_hour": (
        lambda run: run.folder.read_json("status.json")["attempts"][-1].get("price_per_hour"),
        {None: None, 2.5: 2.5},
    ),
}
"""Key -> what a run shows of it, what that is for each value of the key, and other keys of these runs."""

TABLE: dict[str, Check] = {
    **{key: each(key, *row) for key, row in EACH.items()},
    **{f"cluster.nccl.{key}": check_nccl for key in NCCL},
    **{f"grpo.{key}": check for key, check in OF_GRPO.items()},
    **{f"score.{key}": check for key, check in OF_SCORE.items()},
    **{f"hrm.{key}": check for key, check in OF_HRM.items()},
    **{f"preference.{key}": check for key, check in OF_PREFERENCE.items()},
    **{f"reward_model.{key}": check for key, check in OF_REWARD_MODEL.items()},
    "run_name": check_place,
    "output_dir": check_place,
    "seed": check_seed,
    "model.name": check_model_name,
    "model.revision": told("revision", "model.revision", "v2", [None, None], ["v2", "v2"]),
    "model.trust_remote_code": told("trust_remote_code", "model.trust_remote_code", True, [False, False], [True, True]),
    "train.probe": check_probe,
    "datasets.name": check_sources,
    "datasets.path": check_sources,
    "datasets.type": check_type,
    "datasets.val_path": check_held_out,
    "datasets.split": check_held_out,
    "cluster.comm.bucket_cap_mb": check_ddp_keys,
    "cluster.comm.static_graph": check_ddp_keys,
    "cluster.deepspeed": check_deepspeed,
    "rewards.deadline": check_deadline,
    **{f"sandbox.{key}": check_sandbox for key in ("executor", "timeout", "test_timeout", "memory")},
    "sandbox.packages": check_packages,
    "data.format": check_format,
    "data.encoding": check_encoding,
    "data.delimiter": check_delimiter,
    "data.template": check_template,
    "eval.stride": check_stride,
    "model.max_seq_len": pair(longest, 63, 40),
    "model.attn": pair(lambda run: run.trainer.model.config._attn_implementation, "sdpa", "eager"),
    "tuning.lora.r": pair(lambda run: adapted(run).lora_A["default"].weight.shape[0], 4, 3),
    "tuning.lora.alpha": pair(lambda run: adapted(run).lora_alpha["default"], 8, 12.0),
    "tuning.lora.dropout": pair(lambda run: getattr(adapted(run).lora_dropout["default"], "p", 0.0), 0.0, 0.25),
    "tuning.lora.target_modules": pair(
        adapted_names,
        {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
        {"q_proj", "down_proj"},
    ),
    "tuning.lora.modules_to_save": pair(
        lambda run: [n for n, p in run.trainer.model.named_parameters() if p.requires_grad and "embed_tokens" in n],
        [],
        ["base_model.model.model.embed_tokens.modules_to_save.default.weight"],
    ),
    "tuning.lora.dora": pair(lambda run: "default" in adapted(run).lora_magnitude_vector, False, True),
    "tuning.lora.rslora": pair(lambda run: adapted(run).scaling["default"], 8 / 4, 12 / 3**0.5),
    "train.max_steps": pair(steps_and_rows, (4, 32), (6, 72)),
    "train.learning_rate": pair(lambda run: group(run)["initial_lr"], 0.01, 0.5),
    "train.lr_scheduler": pair(lambda run: rates(run)[-2:], cosine(4)[-2:], [round(2 / 3, 6), round(1 / 3, 6)]),
    "train.warmup_ratio": pair(lambda run: rates(run)[:2], cosine(4)[:2], [0.0, round(1 / 3, 6)]),
    "train.weight_decay": pair(lambda run: group(run)["weight_decay"], 0.0, 0.3),
    "train.max_grad_norm": pair(arg("max_grad_norm"), 1.0, 0.7),
    "train.effective_batch_size": pair(lambda run: len(window(run)["row"]), 8, 12),
    "train.gradient_checkpointing": pair(arg("gradient_checkpointing"), False, True),
    "train.packing": pair(lambda run: "position_ids" in micro_batches(run)[0], False, True),
    "train.loss_head": pair(lambda run: run.trainer.label_head is None, False, True),
    "train.optim": pair(lambda run: type(run.trainer.create_optimizer()).__name__, "AdamW", "SGD"),
    "train.neftune_alpha": pair(lambda run: run.trainer.neftune_noise_alpha, None, 5.0),
    "train.eval_steps": pair(arg("eval_steps"), 9, 2),
    "train.save_steps": pair(arg("save_steps"), 9, 4),
    "train.save_total_limit": pair(lambda run: callback(run, MarkComplete.__name__).limit, 2, 5),
    "train.early_stopping": pair(patience, None, 3),
    "train.dataloader_num_workers": pair(lambda run: run.trainer.get_train_dataloader().num_workers, 0, 1),
    "train.dataloader_pin_memory": pair(pins_memory, False, True),
    "train.extra": pair(arg("torch_empty_cache_steps"), None, 9),
    "logging.backend": pair(lambda run: callback(run, "TensorBoardCallback") is not None, False, True),
    "logging.steps": pair(arg("logging_steps"), 1, 3),
}

SHOWN_IN = (
    ("data/test_pipeline.py", "data", "val_path columns split too_long on_bad_row"),
    ("data/test_policies.py", "data", "system duplicates contamination"),
    ("data/test_cache.py", "data", "processed_dir"),
    ("data/mix/test_load_mixture.py", "datasets", "weight"),
    ("data/mix/test_load_mixture.py", "cpt", "cross_document weights_of on_source_end train_tokens"),
    ("evaluate/test_eval_commands.py", "data", "test_path"),
    ("evaluate/test_measuring.py", "eval", "limit metrics"),
    ("generate/test_batch.py", "eval", "max_new_tokens batch_size"),
    ("launch/test_launchers.py", "cluster", "launcher"),
    ("launch/test_restarts.py", "cluster", "max_restarts"),
    ("model/test_load.py", "model", "allow_pickle"),
    ("model/test_new_tokens.py", "tuning.new_tokens", "path"),
    ("plan/test_backend.py", "tuning", "backend"),
    ("reward/test_check.py", "rewards", "judges weight"),
    ("reward/test_model_reward.py", "rewards", "path"),
    ("reward/test_reward_set.py", "rewards", "name use options"),
    ("tasks/test_cpt.py", "", "task_mode"),
    ("tasks/test_cpt.py", "cpt", "block_size"),
    ("tasks/test_cpt.py", "data", "train_path"),
    ("tasks/test_resume.py", "train", "resume"),
    ("tasks/test_sft.py", "eval", "before after"),
    ("tasks/test_start_from_adapter.py", "model", "adapter merge_adapter"),
    ("train/test_gradient_sync.py", "cluster.comm", "hook"),
    ("train/test_metrics.py", "logging", "row_ids"),
    ("tasks/hrm/test_act.py", "hrm", "halt_exploration"),
    ("tasks/hrm/test_puzzle_losses.py", "hrm", "loss"),
    ("tasks/hrm/test_puzzle_launched.py", "hrm", "ema"),
    ("tasks/hrm/test_puzzle_measuring.py", "hrm", "eval_halt n_supervision"),
    (
        "tasks/hrm/test_puzzle_model.py",
        "hrm",
        "arch hidden_size num_heads h_layers l_layers positions puzzle_emb_dim puzzle_emb_len",
    ),
    ("tasks/hrm/test_puzzle_runs.py", "hrm", "stop_at_exact compile"),
    ("plan/test_layout.py", "score.devices", "solver guide value critic target_critic ref"),
    ("tasks/score/test_episodes.py", "score.prompts", "guide revise"),
    ("tasks/score/test_episodes.py", "score", "generation_rows"),
    ("tasks/score/test_placements.py", "score", "placement"),
    ("tasks/score/test_rollout_batch.py", "score", "guidance_warmup epsilon"),
    ("tasks/score/test_score_evaluation.py", "score", "kl1_max"),
    (
        "tasks/score/test_score_runs.py",
        "score",
        "guidance stage1_steps steps_per_generation num_iterations eval_temperature eval_samples min_hint_gain samples",
    ),
    ("tasks/score/test_score_update.py", "score", "value_flow"),
)
"""A file of tests, a section, and the keys of it whose effect the file shows; asked by `tests/mutation.py --keys`."""


@pytest.fixture(scope="module")
def bench(tiny_llama: Path, chat_rows: Path, held_out_rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    home = tmp_path_factory.mktemp("keys")
    inputs = Inputs(tiny_llama, chat_rows, held_out_rows)
    changes = {key.replace(".", "__"): value for key, value in CHANGES.items()}
    return Bench(home, inputs, built(home / "plain", inputs), built(home / "changed", inputs, **changes))


@pytest.mark.parametrize("key", TABLE)
def test_key_changes_what_is_really_used(key: str, bench: Bench):
    TABLE[key](bench)


def test_every_key_of_the_config_has_its_effect_shown_here_or_in_another_file():
    elsewhere = [f"{section}.{name}".lstrip(".") for _, section, names in SHOWN_IN for name in names.split()]
    assert sorted(all_keys()) == sorted([*TABLE, *elsewhere])
    for file, _, names in SHOWN_IN:
        text = (Path(__file__).parent / file).read_text()
        assert [name for name in names.split() if name not in text] == [], file
