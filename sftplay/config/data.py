"""The sections about what a run learns from: `data`, `eval`, `cpt`, a reward of `rewards`, and `sandbox`."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from encodings.aliases import aliases
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from sftplay.config.section import Auto, NotNegative, Positive, PositiveFloat, Problem, Section, Share, UserPath
from sftplay.errors import nearest_names
from sftplay.places import cache_root
from sftplay.units import parse_bytes

if TYPE_CHECKING:
    from sftplay.config.run import RunConfig


DEFAULT_SPLIT = 0.05
Metric = Literal["exact_match", "rouge_l", "chrf"]
Layout = Literal[
    "messages", "sharegpt", "alpaca", "system_user_assistant", "prompt_completion", "question_answer", "mbpp",
    "humaneval", "text",
]  # fmt: skip
Column = Literal[
    "messages", "conversations", "instruction", "input", "output", "system", "user", "assistant", "prompt",
    "completion", "question", "answer", "text", "tools", "history", "chosen", "rejected", "label", "score_chosen",
    "score_rejected", "margin",
]  # fmt: skip
"""What `data.columns` may map; `data.layouts` reads rows by these names, `tasks.preference.pairs` those of pairs."""


class DataConfig(Section):
    """Where the rows are and what happens to unusual ones."""

    train_path: UserPath | None = None
    """Training rows: a file (jsonl, json, csv, tsv, parquet; all but parquet also as .gz), a folder of such files, or
    the hub name of a dataset. Required, unless datasets names the sources of a mixture."""

    val_path: UserPath | None = None
    """Held-out rows, in the same formats. None splits them off the training rows, see split."""

    test_path: UserPath | None = None
    """Rows for `eval --split test`, never seen in training."""

    format: Layout | Auto = "auto"
    """Layout of a row. auto finds it by the keys of each row."""

    columns: dict[Column, str] = Field(default_factory=dict)
    """Column names of your file where they differ, as field: column (`{question: frage}`). A field that is not listed
    keeps its own name."""

    encoding: str = "auto"
    """Encoding of text files, by its name in Python (cp1252, shift_jis). auto: UTF-16 or UTF-32 if it is detected, else
    UTF-8. A byte order mark always decides."""

    delimiter: str = "auto"
    """The one character between the cells of a csv or tsv file. auto finds it in the header."""

    system: str | None = None
    """System prompt for every chat that has none of its own, in training, eval and infer; `make style` writes it. None
    adds none."""

    split: Share | None = None
    """Share of the training rows that is held out when there is no val_path. A hash of the prompt chooses them, so the
    same prompt is always on the same side. None means 0.05; 0 holds out nothing."""

    template: UserPath = "auto"
    """Chat template: auto for the tokenizer's own, chatml for plain ChatML, else the path of a Jinja file."""

    on_bad_row: Literal["error", "skip"] = "error"
    """What happens to a row that cannot be read. error: stop with exit code 4. skip: leave it out, count it, and list
    it with file and line."""

    too_long: Literal["truncate", "drop", "error"] = "truncate"
    """What happens to a row longer than max_seq_len. truncate: cut its end; where that would lose more than half of
    what the rows teach, only if it is written down. drop: leave it out. error: stop with exit code 4. In task mode grpo
    it is about prompts, which are never cut: truncate leaves them out too, see grpo.max_prompt_length."""

    duplicates: Literal["keep", "drop"] = "keep"
    """What happens to a row that equals an earlier one, or differs only in white space, case or Unicode normalisation.
    keep: train on it again. drop: leave it out. Both are counted."""

    contamination: Literal["error", "drop"] = "error"
    """What happens to a training row that is also in val_path or test_path, compared in the same way, or that belongs
    to the published test problems of MBPP or HumanEval. error: stop with exit code 4. drop: leave it out of
    training."""

    processed_dir: UserPath = str(cache_root() / "processed")
    """Folder of the tokenised rows, which later runs use again; safe to delete."""


class EvalConfig(Section):
    """Evaluation of a model on the held-out rows."""

    before: bool = False
    """Evaluate the untrained model when the run starts."""

    after: bool = False
    """Evaluate the result when the run ends."""

    limit: Positive | None = 200
    """Maximum number of prompts to answer; the loss always uses every held-out row. None means all."""

    max_new_tokens: Positive = 128
    """Maximum length of an answer in tokens."""

    batch_size: Positive = 16
    """Number of prompts that are answered at the same time."""

    metrics: list[Metric] = Field(default=["exact_match"], min_length=1)
    """Metrics that compare an answer with its reference, without surrounding white space."""

    stride: Positive | None = None
    """Tokens by which the window slides over held-out documents (task modes cpt and cpt_mixed); the window is a block.
    Smaller gives each token more text before it, and takes longer. None means half the window."""


SourceType = Literal["cpt", "chat"]


class DatasetConfig(Section):
    """One source of a mixture. An entry is named on the command line by its name or its number, from 0:
    `datasets.chat.weight=0`, `datasets.1.weight=0`."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$", max_length=64)]
    """Name of the source in logs, metrics and reports: letters, digits, `_`, `.` and `-`. Each source has its own."""

    path: UserPath
    """Rows of the source: a file (jsonl, json, csv, tsv, parquet; all but parquet also as .gz), a folder of such files,
    or the hub name of a dataset."""

    type: SourceType
    """cpt: documents, every token is learned. chat: chats, learned and masked exactly as task_mode sft does it."""

    weight: NotNegative = 1.0
    """Share of this source in what is trained on, counted as cpt.weights_of says. Weights are divided by their sum. 0:
    the source is not trained on, only measured."""

    val_path: UserPath | None = None
    """Held-out rows of the source. None splits them off its rows, see split."""

    split: Share | None = None
    """Share of the source's rows that is held out when it has no val_path; a document is held out as a whole. None
    means data.split."""


class CptConfig(Section):
    """Continued pre-training: documents of tokens, packed into full blocks."""

    block_size: Annotated[int, Field(ge=8)] | None = None
    """Tokens of a block, which is the row of this task. None means model.max_seq_len."""

    cross_document: bool = False
    """Let tokens attend to the documents before theirs in a block, as the classical concatenation does. false: each
    document is computed as if it stood alone; nothing is learned from unrelated text, and packing changes no loss."""

    weights_of: Literal["trainable_tokens", "examples"] = "trainable_tokens"
    """What datasets.weight is a share of. trainable_tokens: tokens that are learned. examples: documents and chats."""

    on_source_end: Literal["repeat", "stop"] = "repeat"
    """What happens when a source has been read once and the run goes on. repeat: read it again in a new order. stop:
    the run ends."""

    train_tokens: Positive | None = None
    """Tokens to train on; the number of steps follows from it. None: train.max_steps or train.epochs decides."""


DATASETS_EXAMPLE = "- {name: domain, path: data/processed/domain.jsonl, type: cpt, weight: 0.9}"


def needs_train_path(cfg: RunConfig) -> bool:
    """Return whether data.train_path is missing: nothing else names the rows."""
    return cfg.data.train_path is None and not cfg.datasets and not cfg.task.mixes_chats


def broken_cpt_rules(cfg: RunConfig) -> Iterator[Problem]:
    """Yield every rule that `datasets` and `cpt` break."""
    yield from _dataset_rules(cfg)
    if not cfg.learns_documents:
        return
    size, limit, steps = cfg.cpt.block_size, cfg.model.max_seq_len, cfg.train.max_steps
    if size is not None and size > limit:
        what = f"{size} is more than model.max_seq_len {limit}"
        fix = f"write model.max_seq_len: {size}, or a smaller block_size"
        yield Problem(("cpt.block_size", "model.max_seq_len"), what, fix=fix)
    if cfg.eval.stride is not None and cfg.eval.stride >= cfg.row_tokens:
        what = f"{cfg.eval.stride} is not less than the window, a block of {cfg.row_tokens} tokens"
        fix = f"write eval.stride: {cfg.row_tokens // 2}, or remove it"
        yield Problem(("eval.stride", "cpt.block_size", "model.max_seq_len"), what, fix=fix)
    if cfg.cpt.train_tokens is not None and steps is not None:
        what = f"{cfg.cpt.train_tokens} is given, but train.max_steps {steps} says how long the run is"
        yield Problem(("cpt.train_tokens", "train.max_steps"), what, fix="keep one of the two")


def idle_cpt_keys(cfg: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Yield each key without effect, the key that takes its effect away, and why."""
    if not cfg.learns_documents:
        task = f"task_mode {cfg.task_mode}"
        yield from ((f"cpt.{name}", "task_mode", f"{task} has no blocks") for name in type(cfg.cpt).model_fields)
        yield "eval.stride", "task_mode", f"{task} slides no window over documents"
        return
    yield "train.packing", "task_mode", f"the rows of task_mode {cfg.task_mode} are full blocks"
    if cfg.cpt.train_tokens is not None:
        yield "train.epochs", "cpt.train_tokens", f"cpt.train_tokens {cfg.cpt.train_tokens} ends the run"
    if all(source.type == "cpt" for source in cfg.sources):
        for key in ("data.too_long", "data.template", "data.system"):
            yield key, "task_mode", "no chat is among the rows, and long documents continue over blocks"
    if len(cfg.sources) == 1:
        yield "cpt.weights_of", "datasets" if cfg.datasets else "task_mode", "there is one source"


def has_held_out(cfg: RunConfig) -> bool:
    """Return whether the config asks for held-out rows of any source."""
    return any(source.val_path is not None or held_out_share(cfg, source) != 0 for source in cfg.sources)


def held_out_share(cfg: RunConfig, source: DatasetConfig | None = None) -> float:
    """Return the share of the rows, or of a source's rows, that is held out where no file of held-out rows is named."""
    split = cfg.data.split if source is None or source.split is None else source.split
    return DEFAULT_SPLIT if split is None else split


def _dataset_rules(cfg: RunConfig) -> Iterator[Problem]:
    if not cfg.datasets:
        if cfg.task.mixes_chats:
            fix = f"write datasets: {DATASETS_EXAMPLE}"
            yield Problem(("task_mode", "datasets"), "cpt_mixed needs datasets", fix=fix)
        return
    if not cfg.learns_documents:
        mixed = "write task_mode: cpt_mixed, or " if cfg.task.is_probed else ""  # its rows are those of sft
        fix = f"{mixed}put their rows into one file or folder, and name it with data.train_path"
        what = f"are for task modes cpt and cpt_mixed, not for {cfg.task_mode}"
        yield Problem(("datasets", "task_mode"), what, fix=fix)
    for name in ("train_path", "val_path", "test_path"):
        key = f"data.{name}"
        if cfg.get_value(key) is not None:
            fix = "remove it; each entry of datasets has path and val_path"
            yield Problem((key, "datasets"), "is given, but datasets names the rows already", fix=fix)
    if not any(source.weight for source in cfg.datasets):
        what = "every weight is 0, so nothing would be trained on"
        yield Problem(("datasets.0.weight", "datasets"), what, fix="give one source a weight above 0")
    for number, source in enumerate(cfg.datasets):
        if not cfg.task.mixes_chats and cfg.learns_documents and source.type == "chat":
            what = f"{source.name!r} is chat, but task_mode {cfg.task_mode} learns documents only"
            yield Problem((f"datasets.{number}.type", "task_mode"), what, fix="write task_mode: cpt_mixed")
        if source.val_path is not None and source.split is not None:
            key, other = f"datasets.{number}.split", f"datasets.{number}.val_path"
            what = f"{source.split:g} is given, but {other} names the held-out rows already"
            yield Problem((key, other), what, fix="remove one of the two")


_ESCAPES = {r"\t": r"\t", "tab": r"\t", "comma": ",", "semicolon": ";", "pipe": "|", "space": " "}
"""What people write for a character that is hard to type -> how YAML spells it in double quotes."""

_NOT_OF_FILES = ("undefined", "idna", "punycode", "unicode_escape", "raw_unicode_escape")

_NO_CELLS = (".jsonl", ".ndjson", ".json", ".parquet")


def broken_data_rules(cfg: RunConfig) -> Iterator[Problem]:
    """Yield every rule that the section `data` breaks."""
    # A folder of rows is read with everything below it, except hidden files and folders.
    written = (("data.processed_dir", cfg.data.processed_dir), ("output_dir", cfg.output_dir))
    for name, path in row_paths(cfg):
        above = Path(path).absolute()
        for key, folder in written:
            below = Path(folder).absolute()
            parts = below.relative_to(above).parts if below.is_relative_to(above) else (".",)
            if not any(part.startswith(".") for part in parts):
                what = f"{folder!r} lies in the folder of rows {path!r}: what is written there would be read as rows"
                yield Problem((key, name), what, fix="name a folder outside of it, or one that is hidden")
    first: dict[str, str] = {}
    for name, column in cfg.data.columns.items():
        key = f"data.columns.{name}"
        if not column.strip():
            yield Problem((key,), "is empty", fix="name a column of your file, or leave the key out")
        elif column in first:
            what = f"the column {column!r} is given to {first[column]!r} already"
            yield Problem((key, f"data.columns.{first[column]}"), what, fix="keep it in one of the two")
        else:
            first[column] = name
    yield from _encoding(cfg.data.encoding)
    yield from _delimiter(cfg.data.delimiter)


def row_paths(cfg: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield key and path of all rows that the run reads."""
    keys = ["data.train_path", "data.val_path", "data.test_path"]
    keys += [f"datasets.{number}.{name}" for number in range(len(cfg.datasets)) for name in ("path", "val_path")]
    yield from ((key, path) for key in keys if (path := cfg.get_value(key)))


def idle_data_keys(cfg: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Yield each key without effect, the key that takes its effect away, and why."""
    if all(path.lower().removesuffix(".gz").endswith(_NO_CELLS) for _, path in row_paths(cfg)):
        yield "data.delimiter", "data.train_path", "no csv or tsv file is named"


def _encoding(name: str) -> Iterator[Problem]:
    if name == "auto" or not name.strip() or "\0" in name:
        return
    known = {"auto", *aliases, *aliases.values()} - {"mbcs", "dbcs", "ansi", "oem"}  # these exist on Windows only
    near = nearest_names(name.lower().replace("-", "_").replace(" ", "_"), sorted(known))
    try:
        # A codec such as base64 or zip turns bytes into bytes; those of _NOT_OF_FILES are no encodings of files.
        found = codecs.lookup(name)
        if found._is_text_encoding and found.name not in _NOT_OF_FILES:
            return
        what, near = f"{name!r} is no encoding of text", []
    except (LookupError, ValueError):
        what = f"Python knows no encoding called {name!r}"
    fix = f"did you mean {near[0]!r}?" if near else "write auto, or a name such as utf-8, cp1252 or shift_jis"
    yield Problem(("data.encoding",), what, fix=fix, nearest=tuple(near))


def _delimiter(text: str) -> Iterator[Problem]:
    if text == "auto" or (len(text) == 1 and text not in '"\r\n\0'):
        return
    key = ("data.delimiter",)
    if text.lower() in _ESCAPES:
        fix = f'write it in double quotes: "{_ESCAPES[text.lower()]}"'
        yield Problem(key, f"{text!r} is not one character", fix=fix)
    elif len(text) == 1:
        yield Problem(key, f"{text!r} cannot stand between cells", fix="write another character, or auto")
    else:
        near = tuple(nearest_names(text, ["auto"]))
        fix = "did you mean 'auto'?" if near else "write the one character between two cells, or auto"
        yield Problem(key, f"{text!r} is {'no' if not text else 'not one'} character", fix=fix, nearest=near)


CODE_TESTS = "code_tests"  # the reward whose programs run in the sandbox
MODEL = "model"  # the reward that a trained model gives
ENVIRONMENT = "environment"  # the reward that grpo.environment gives in the turns of a completion


class RewardConfig(Section):
    """One reward: a function from completions to numbers, see docs/rewards.md. An entry is named on the command line
    by its name or its number, from 0: `rewards.answer.deadline=2`."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$", max_length=64)]
    """Name of the reward in logs, metrics and reports: letters, digits, `_` and `-`. Each reward has its own."""

    use: str
    """What computes it: format, syntax, length, overlong, repetition, exact_match, regex, json_schema, math,
    code_tests, model or environment; or your own function, as `module:function` or `path.py:function`. It gets
    `completions` and the columns of their rows by name, and returns a number for each completion, or None where nothing
    is known."""

    path: UserPath | None = None
    """model: the reward model, as the folder or the name of a run of task mode reward_model, or as the folder of any
    model for sequence classification with one label, or of an adapter for it."""

    options: dict[str, Any] = Field(default_factory=dict)
    """What else the function is given, by name: `{pattern: "yes|no"}`."""

    weight: float = 1.0
    """What its value is multiplied by in the sum that a model learns from. 0 means that it is measured only."""

    judges: Literal["content", "form"] | None = None
    """content: only a right answer gets its full value. form: any answer of the right shape does. `reward-check` and
    the share of answers that pass go by it. None takes a function of yours to judge the content; what shipped rewards
    judge is known."""

    deadline: PositiveFloat = 10.0
    """Seconds that it may take: a shipped reward for each completion, a function of yours for each batch. Then nothing
    is known of these completions: they count as None, never as 0."""


class SandboxConfig(Section):
    """The boxes in which the programs of a model run (reward code_tests), see docs/sandbox.md."""

    executor: Literal["auto", "bwrap", "landlock", "none"] = "auto"
    """What boxes are made of. auto takes bwrap (bubblewrap), or landlock, whichever first passes its self-test here,
    and refuses to start where neither does. none isolates nothing: programs that a model wrote can do whatever you can
    do, and results say so."""

    timeout: PositiveFloat = 5.0
    """Seconds that a program may take for all its tests."""

    test_timeout: PositiveFloat = 4.0
    """Seconds that it may take for one test."""

    memory: str | Positive = "512MiB"
    """Memory of one process of a program: 512MiB, 1GiB or a number of bytes. numpy needs 1GiB."""

    packages: list[str] = Field(default_factory=list)
    """Packages that programs may import besides Python's own, as `import` names them: [numpy, sympy]. The box shows
    their folders and no others."""


LEAST_MEMORY = 64 << 20  # bytes that the interpreter itself needs, with room for a small program


def broken_reward_rules(cfg: RunConfig) -> Iterator[Problem]:
    """Yield limits of the sandbox that contradict each other, and deadlines that the sandbox cannot keep."""
    box = cfg.sandbox
    if box.test_timeout > box.timeout:
        what = f"one test may take {box.test_timeout:g} s, and all tests together {box.timeout:g} s"
        yield Problem(("sandbox.test_timeout", "sandbox.timeout"), what, fix="raise sandbox.timeout")
    try:
        n_bytes = parse_bytes(str(box.memory))
    except ValueError as error:
        yield Problem(("sandbox.memory",), str(error), fix="write 512MiB")
    else:
        if n_bytes < LEAST_MEMORY:
            what = f"{n_bytes:,} bytes are not enough for Python"
            yield Problem(("sandbox.memory",), what, fix="write 64MiB or more")
    for number, reward in enumerate(cfg.rewards):
        path = f"rewards.{number}.path"
        if reward.use == MODEL and reward.path is None:
            what, fix = "the reward model needs a model to ask", f"write {path}: RUN, a run of task_mode reward_model"
            yield Problem((path, f"rewards.{number}.use"), what, fix=fix)
        if reward.use == MODEL and cfg.task.turns == 2:
            what = f"task_mode {cfg.task_mode} counts right answers, and a model's score has no value for right"
            yield Problem(
                (f"rewards.{number}.use", "task_mode"), what, fix="use a reward of 0 to 1, or task_mode: grpo"
            )
        if reward.use == ENVIRONMENT and not (cfg.task.learns_from_rewards and cfg.grpo.environment):
            what = "nothing gives the reward environment: there is no grpo.environment"
            fix = "name one in task_mode grpo, or use another reward"
            yield Problem((f"rewards.{number}.use", "grpo.environment"), what, fix=fix)
        if reward.use != MODEL and reward.path is not None:
            what = f"{reward.path} is given, but {reward.use} asks no model"
            yield Problem((path, f"rewards.{number}.use"), what, fix=f"write use: {MODEL}, or remove path")
        if reward.use == CODE_TESTS and reward.deadline < box.timeout:
            what = f"ends before a program has had its {box.timeout:g} s: an endless loop would never count as 0"
            keys = (f"rewards.{number}.deadline", "sandbox.timeout")
            yield Problem(keys, what, fix="raise it above sandbox.timeout, or lower sandbox.timeout")


def idle_reward_keys(cfg: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Yield the keys of the sandbox, with the reason, where no programs run."""
    if not any(reward.use == CODE_TESTS for reward in cfg.rewards):
        for name in type(cfg.sandbox).model_fields:
            yield f"sandbox.{name}", f"sandbox.{name}", f"no reward uses {CODE_TESTS}"
