"""Share the questions to a model over several processes, and merge their answers."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from argparse import Namespace
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sftplay import log
from sftplay.atomic import read_object, write_text
from sftplay.config.load import load_config
from sftplay.config.resolved import dump_resolved
from sftplay.config.run import RunConfig
from sftplay.data.records import Message
from sftplay.errors import ConfigError, RunError, SftplayError, error_from_json
from sftplay.launch.command import Launch, Scale, build_launch
from sftplay.launch.processes import end_launch
from sftplay.launch.run_folder import RunFolder, find_run
from sftplay.machine.probe import probe
from sftplay.model.source import is_local
from sftplay.model.start_point import resolve_names
from sftplay.plan.sizing import decide_numerics
from sftplay.runs.finished_run import load_renderer, open_run, prepare_environment
from sftplay.runs.inputs import check_model, known_shape
from sftplay.signals import die_with_parent, popen_tied


@dataclass(frozen=True)
class Subject:
    """A model that can be opened."""

    cfg: RunConfig
    """A run's resolved config; or one whose names are resolved, with precision and attention decided."""

    folder: RunFolder
    """Where figures go: the run's folder, or one that no run has."""

    run: bool
    """Whether `folder` is that of a run."""

    base: bool
    """Whether the weights are those before training."""

    def describe(self) -> dict[str, Any]:
        """What figures say of it."""
        model = self.cfg.model
        names = {"run": str(self.folder.path) if self.run else None, "model": model.name, "adapter": model.adapter}
        step = None if self.base else self.folder.read_json("status.json").get("step")
        return {**names, "weights": "start" if self.base else "result", "step": step}

    def open(self) -> tuple[Any, Any, Any]:
        """Model, in evaluation mode, tokenizer and renderer. It imports the heavy libraries. Raise what
        `load_tokenizer`, `Renderer.prove` and `load_result` or `load_untrained` raise.
        """
        from sftplay.model.load import load_base, load_result, load_untrained

        if self.run:
            tokenizer, renderer = load_renderer(self.cfg, self.folder)
            load = load_untrained if self.base else load_result
            return load(self.cfg, self.folder.path), tokenizer, renderer
        from sftplay.data.render.render import Renderer
        from sftplay.data.render.templates import resolve_template
        from sftplay.model.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(self.cfg.model)
        template = resolve_template(self.cfg.data.template, tokenizer)
        return load_base(self.cfg).eval(), tokenizer, Renderer.prove(tokenizer, template, samples=[])


def find_subject(args: Namespace) -> Subject:
    """Return what the command line means: a run of the config where there is one, else the config's model. Raise
    ConfigError where the run that is named is not there or has no result, or the model or adapter is not there.
    """
    given = load_config(args.config, args.overrides)
    try:
        find_run(given, args.config, run=args.run)
    except ConfigError:
        if args.run:
            raise
        cfg = resolve_names(given)
        check_model(cfg, asks_hub=True)
        decided = decide_numerics(cfg, probe(), shape=known_shape(cfg))
        keys = [key for key in ("train.precision", "model.attn") if cfg.get_value(key) == "auto"]
        cfg = cfg.with_values({key: decided[key].value for key in keys}, "auto")
        adapter = f" with the adapter {cfg.model.adapter}" if cfg.model.adapter else ""
        log.say(f"no run of {args.config} yet: measuring {cfg.model.name}{adapter} as it is", "eval")
        folder = RunFolder(Path(cfg.output_dir) / f"{Path(args.config).stem}-untrained")
        return Subject(cfg, folder, run=False, base=True)
    try:
        cfg, folder = open_run(args, needs_result=not args.base)
    except ConfigError as error:
        fix = f"{error.fix}; what it started from is measured with ARGS=--base"
        raise ConfigError(error.what, where=error.where, fix=fix) from error
    values = {"cluster.launcher": given.cluster.launcher, "sandbox": given.sandbox.model_dump()}
    return Subject(cfg.with_values(values, "command line"), folder, run=True, base=args.base)


@dataclass(frozen=True)
class Questions:
    """What is asked, and how answers are sampled. All of it is plain data, for other processes."""

    texts: tuple[str, ...]
    samples: int
    """Answers to each."""

    temperature: float
    top_p: float
    seed: int
    max_new_tokens: int

    def share(self, rank: int, world_size: int) -> list[int]:
        """Return the numbers of the answers that a process makes: those of every `world_size`-th question."""
        numbers = range(len(self.texts) * self.samples)
        return [number for number in numbers if number // self.samples % world_size == rank]

    def digest(self) -> str:
        """Return the hex sha256 of what is asked."""
        return hashlib.sha256("\0".join(self.texts).encode()).hexdigest()


def make_questions(texts: Sequence[str], *, cfg: RunConfig, args: Namespace) -> Questions:
    """Return the questions with what the command line says of the answers, and the config where it says nothing."""
    return Questions(
        tuple(texts), args.n, args.temperature, args.top_p or 1.0, cfg.seed if args.seed is None else args.seed,
        args.max_new_tokens or cfg.eval.max_new_tokens,
    )  # fmt: skip


def answer_share(subject: Subject, questions: Questions, *, rank: int = 0, world_size: int = 1) -> dict[int, str]:
    """Return this process's answers by their number; answer `i` is one to question `i // samples`.

    Random numbers belong to an answer's number, so that they do not depend on the number of processes.
    """
    prepare_environment(subject.cfg)
    from sftplay.generate.generate import Generator, Sampling, answer_all

    cfg = subject.cfg
    model, tokenizer, renderer = subject.open()
    sampling = Sampling(questions.temperature, questions.top_p, questions.seed)
    generator = Generator(model, tokenizer, renderer.end_token_ids, questions.max_new_tokens, sampling)
    system = (Message("system", cfg.data.system),) if cfg.data.system else ()
    numbers = questions.share(rank, world_size)
    asked = [Message("user", questions.texts[number // questions.samples]) for number in numbers]
    prompts = [renderer.prompt_ids((*system, question), "") for question in asked]
    answers = answer_all(generator, prompts, batch_size=cfg.eval.batch_size, rows=numbers)
    return dict(zip(numbers, answers, strict=True))


CONFIG, TASK = "config.yaml", "questions.json"
"""Files of the folder that all ranks share. Rank N leaves rankN.json there."""


def main(folder: str) -> int:
    """Answer this rank's share, and leave answers or an error in `folder`/rankN.json; 0, or the error's exit code."""
    die_with_parent()
    here, rank = Path(folder), log.rank()
    task = json.loads((here / TASK).read_text(encoding="utf-8"))
    subject = Subject(load_config(here / CONFIG), RunFolder(Path(task["folder"])), run=task["run"], base=task["base"])
    questions = Questions(**{**task["questions"], "texts": tuple(task["questions"]["texts"])})
    note: dict[str, Any]
    try:
        note, code = {"answers": answer_share(subject, questions, rank=rank, world_size=log.world_size())}, 0
    except SftplayError as error:
        note, code = {"error": error.as_json()}, error.exit_code
    write_text(here / f"rank{rank}.json", json.dumps(note))
    return code


def answer_by_ranks(subject: Subject, questions: Questions, *, scale: Scale, has_gpu: bool) -> list[str]:
    """Return the answers in order; `scale` says how many processes of this node share the questions. Raise what a rank
    has raised, and RunError where one has died.
    """
    if scale.world_size == 1:
        answers = answer_share(subject, questions)
    else:
        with TemporaryDirectory(prefix="eval-code-") as name:
            folder = Path(name)
            task = {"folder": str(subject.folder.path), "run": subject.run, "base": subject.base}
            write_text(folder / CONFIG, dump_resolved(subject.cfg))
            write_text(folder / TASK, json.dumps({**task, "questions": asdict(questions)}))
            last_lines = _run(build_ranks(subject, folder, scale=scale, has_gpu=has_gpu))
            answers = gather(folder, scale.world_size, last_lines=last_lines)
    return [answers[number] for number in range(len(questions.texts) * questions.samples)]


def build_ranks(subject: Subject, folder: Path, *, scale: Scale, has_gpu: bool) -> Launch:
    """Return the command of a run of this scale that starts answering ranks instead of workers.

    Ranks exchange nothing, so DeepSpeed's launcher would add nothing to torchrun, and is not used.
    """
    return build_launch(
        folder, scale, has_gpu=has_gpu, is_offline=is_local(subject.cfg.model.name), module="sftplay.runs.code_eval",
        launcher="accelerate" if subject.cfg.cluster.launcher == "accelerate" else "auto",
    )  # fmt: skip


def _run(launch: Launch) -> list[str]:
    """Run it to its end and show the ranks' own lines; return the last 20 of the others."""
    for path, text in launch.files.items():
        write_text(Path(path), text)
    console, unmarked = log.new_console(), deque[str](maxlen=20)
    process = popen_tied(launch.argv, output=subprocess.PIPE, env=launch.env)
    assert process.stdout is not None
    try:
        for raw in process.stdout:
            text = raw.decode("utf-8", "replace").rstrip("\n")
            if not log.show_marked(text, console=console):
                unmarked.append(text)
        process.wait()
    finally:
        console.close()
        process.stdout.close()
        if process.poll() is None:
            end_launch(process.pid)
            process.wait()
    return list(unmarked)


def gather(folder: Path, world_size: int, *, last_lines: list[str]) -> dict[int, str]:
    """Return the answers of all ranks by their number; `last_lines` are the launcher's. Raise what a rank has raised,
    and RunError where one has died.
    """
    notes = [read_object(folder / f"rank{rank}.json") for rank in range(world_size)]
    for note in notes:
        if "error" in note:
            raise error_from_json(note["error"])
    if missing := [str(rank) for rank, note in enumerate(notes) if "answers" not in note]:
        log.show_error("\n".join(last_lines))
        fix = "look at the lines above; `make doctor` looks at this machine"
        raise RunError("ended without its answers", where=f"rank {', '.join(missing)}", fix=fix)
    return {int(number): answer for note in notes for number, answer in note["answers"].items()}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
