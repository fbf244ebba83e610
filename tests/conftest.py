"""Fixtures shared by all tests: a tiny Llama folder with a trained tokenizer, the builtin model, and real runs.

Tests run in several processes (pytest-xdist), one file in one of them. What costs much is built by the first process
that needs it and read by the others: `build_once`.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import documents
import fork_server
import forked_python as forked
import pytest
from _pytest.assertion import rewrite
from _pytest.assertion.rewrite import assertstate_key as STATE
from hypothesis import HealthCheck, settings
from processes import HANG_S
from small_run import WORDS, Inputs, write_small_run

from sftplay.signals import STOP_SIGNALS

ROOT = Path(__file__).resolve().parents[1]
SHARED_DATA = ROOT.parent / "shared" / "data"

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# A busy machine is no failure, and `--hypothesis-profile=thorough` is what `make test-slow` takes.
PROPERTY = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]}
# Both draw the same examples each time. `--hypothesis-profile=search` draws others, to find what no test shows yet.
settings.register_profile("fast", max_examples=50, derandomize=True, **PROPERTY)
settings.register_profile("thorough", max_examples=400, derandomize=True, **PROPERTY)
settings.register_profile("search", max_examples=400, **PROPERTY)
settings.load_profile("fast")


def pytest_configure() -> None:
    """A shell that starts the suite in the background has it, and all it starts, ignore Ctrl-C, and nohup hanging up;
    tests send both. A handler here is the default in what is started."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_, **__: None)


def pytest_sessionstart(session: pytest.Session) -> None:
    """On a fresh checkout each process rewrites the asserts of a part of the files, and reads what the others wrote."""
    count, state = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")), session.config.stash.get(STATE, None)
    if count == 1 or state is None or sys.dont_write_bytecode:
        return
    number = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    for path in sorted((ROOT / "tests").rglob("test_*.py"))[number::count]:
        written = rewrite.get_cache_dir(path) / f"{path.stem}{rewrite.PYC_TAIL}"
        if not written.exists() and rewrite.try_makedirs(written.parent):
            digest, code = rewrite._rewrite_test(path, session.config)
            rewrite._write_pyc(state, code, digest, written)


os.environ.setdefault("SFTPLAY_CACHE", ".cache")  # a test's working folder keeps its caches
documents.check_documents()

FORKING = fork_server.lazy_client(ROOT)
FORKED = (
    "launch", "tasks", "runs", "train", "evaluate", "generate", "export", "report", "test_demo.py", "test_workflows.py",
    "config/test_import_config.py", "config/test_import_same_run.py", "plan/test_built_shape.py",
)  # fmt: skip
"""Below tests/: the tests there start their processes by a fork of one that has imported the libraries (see
`fork_server`). Those elsewhere measure a process, or what it imports."""

FORKED_IF_SLOW = ("commands", "environments/test_tool_story.py", "test_verb_documents.py")
"""Here the fast tests start what is lighter than the server of forks."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    """Fixtures of a module start their processes as its first test does."""
    places = (*FORKED, *(FORKED_IF_SLOW if item.get_closest_marker("slow") else ()))
    is_forked = any(item.path.is_relative_to(ROOT / "tests" / place) for place in places)
    if FORKING is None or not is_forked or item.get_closest_marker("fresh_start"):
        return (yield)
    put_back = fork_server.install(FORKING)
    try:
        return (yield)
    finally:
        put_back()


def pytest_unconfigure() -> None:
    if FORKING is not None:
        FORKING.close()


COLLECTED = pytest.StashKey[frozenset[str]]()


LONGEST = (
    "tasks/grpo/test_vllm_training.py", "runs/test_sweep_runs.py", "launch/test_server_on_cluster.py",
    "launch/test_board_launches.py", "launch/test_restarts.py", "tasks/grpo/test_story.py",
    "tasks/preference/test_pair_toy.py", "test_demo.py", "tasks/test_out_of_memory_runs.py", "evaluate/test_harness.py",
    "export/test_serve_vllm.py", "parity/test_parity_by_vllm.py", "launch/test_slurm_cluster.py",
    "tasks/preference/test_reference_runs.py", "tasks/score/test_toy.py", "sandbox/test_attacks.py",
    "environments/test_tool_story.py", "oracle/test_record.py", "export/test_served_names.py",
    "parity/test_parity.py", "export/test_gguf.py",
)  # fmt: skip
"""Files that take longest. A file stays in one process: one of these begun last would leave the others idle."""


def start_order(items: list[pytest.Item]) -> Callable[[pytest.Item], tuple[int, int]]:
    """The key to sort tests by: the longest files first, then those of many tests."""
    places = {ROOT / "tests" / name: place for place, name in enumerate(LONGEST)}
    counts = Counter(item.path for item in items)
    return lambda item: (places.get(item.path, len(LONGEST)), -counts[item.path])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What needs the builtin model is slow: most of it trains or measures that model."""
    config.stash[COLLECTED] = frozenset(item.nodeid for item in items)
    files = {path: place for place, path in enumerate(dict.fromkeys(item.path for item in items))}
    first = start_order(items)
    items.sort(key=lambda item: (*first(item), files[item.path]))
    for item in items:
        if "builtin_tiny" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def forked_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """`PY=` of make and of shell scripts, by which slow tests fork what these start (see `forked_python`)."""
    with forked.open_python(tmp_path_factory.mktemp("python") / "python") as script:
        yield script


@pytest.fixture
def collected(pytestconfig: pytest.Config) -> frozenset[str]:
    """The tests that were found, before marks chose among them."""
    return pytestconfig.stash[COLLECTED]


@pytest.fixture(autouse=True)
def process_put_back() -> Iterator[None]:
    """Verbs set variables for the libraries they import, and a worker that ends ignores stop signals. Run inside a
    test, neither must reach the next one, nor the processes that it starts."""
    before, handlers = dict(os.environ), {each: signal.getsignal(each) for each in STOP_SIGNALS}
    yield
    for each, handler in handlers.items():
        signal.signal(each, handler)
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(autouse=True, scope="module")
def imported_objects_are_not_collected() -> None:
    """Every training collects garbage, which took a third of its time among a million objects of torch and pytest."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def environment_put_back() -> Iterator[None]:
    """What a module's own fixtures leave among the variables ends with it: `fork_server` starts no process by a fork
    where one is set that libraries read when they are imported."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def verbs_environment() -> Iterator[None]:
    """What a verb that runs in a module's own fixtures sets for the libraries is undone behind that module."""
    from sftplay.launch.command import cache_environment, offline_environment, quiet_environment

    with pytest.MonkeyPatch.context() as patch:
        for key in quiet_environment() | cache_environment() | offline_environment():
            patch.setenv(key, "1")
        yield


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that all processes of this session see."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


def build_once(folder: Path, build: Callable[[Path], object]) -> Path:
    """`folder`, built by the first process that asks for it while the others wait."""
    with open(f"{folder}.lock", "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        if not (built := Path(f"{folder}.built")).exists():
            build(folder)
            built.touch()
    return folder


@pytest.fixture(scope="session")
def tiny_llama(shared_folder: Path) -> Path:
    """A random two-layer Llama with a 400-token byte-level BPE, saved as transformers saves."""
    return build_once(shared_folder / "tiny-llama", build_tiny_llama)


def build_tiny_llama(folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    rng = random.Random(0)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<pad>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((" ".join(rng.choices(WORDS, k=12)) for _ in range(300)), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|im_end|>", chat_template=CHATML
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=400, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0, eos_token_id=2, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)


@pytest.fixture(scope="session")
def builtin_tiny() -> Path:
    """The folder of `builtin:tiny`, copied once a checkout into its cache."""
    from sftplay.model.builtin import ensure_builtin

    return ensure_builtin("tiny", ROOT / ".cache" / "builtin", say=print)


@pytest.fixture(scope="session")
def chat_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """70 rows of one-turn dialogues with answers of 1 to 30 words."""
    return write_chats(tmp_path_factory.mktemp("rows") / "train.jsonl", 70, seed=1)


@pytest.fixture(scope="session")
def held_out_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 rows of the same kind as `chat_rows`."""
    return write_chats(tmp_path_factory.mktemp("rows") / "held_out.jsonl", 12, seed=2)


def write_chats(path: Path, count: int, *, seed: int) -> Path:
    rng = random.Random(seed)
    lines = []
    for n in range(count):
        question = f"{n} " + " ".join(rng.choices(WORDS, k=rng.randint(1, 12)))
        answer = " ".join(rng.choices(WORDS, k=rng.choice([1, 2, 3, 8, 30])))
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": turns}))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="session")
def inputs(tiny_llama: Path, chat_rows: Path, held_out_rows: Path) -> Inputs:
    """The files of a small run."""
    return Inputs(tiny_llama, chat_rows, held_out_rows)


@pytest.fixture
def write_config(tmp_path: Path, inputs: Inputs) -> Callable[..., Path]:
    """Writes a small run's YAML below tmp_path; keyword `a__b=c` sets the key a.b."""

    def write(name: str = "run.yaml", **changes: Any) -> Path:
        return write_small_run(tmp_path, inputs, name, **changes)

    return write


@pytest.fixture(scope="session")
def sftplay() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `python -m sftplay ...` as a user would, from the repository's root."""

    def call(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "OMP_NUM_THREADS": "1", **options.pop("env", {})}
        done = subprocess.run(
            [sys.executable, "-m", "sftplay", *map(str, words)],
            cwd=options.pop("cwd", ROOT), timeout=options.pop("timeout", HANG_S), env=env, capture_output=True,
            text=True, check=False, **options,
        )  # fmt: skip
        documents.check_document(words, done.stdout)
        return done

    return call
