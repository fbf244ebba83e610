"""Many questions to one model, each asked several times; a process answers its share of them."""

from __future__ import annotations

import hashlib
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass

from sftplay import log
from sftplay.config.schema.run import RunConfig
from sftplay.control.code_eval.subject import Subject
from sftplay.control.finished_run import prepare_environment


@dataclass(frozen=True)
class Questions:
    """What is asked, and how answers are drawn. All of it is plain data, for other processes."""

    texts: tuple[str, ...]
    samples: int
    """Answers to each."""

    temperature: float
    top_p: float
    seed: int
    max_new_tokens: int

    def share(self, rank: int, world_size: int) -> list[int]:
        """The numbers of the answers that a process makes: those of every `world_size`-th question."""
        numbers = range(len(self.texts) * self.samples)
        return [number for number in numbers if number // self.samples % world_size == rank]

    def digest(self) -> str:
        """Hex sha256 of what is asked."""
        return hashlib.sha256("\0".join(self.texts).encode()).hexdigest()


def questions_of(texts: Sequence[str], *, cfg: RunConfig, args: Namespace) -> Questions:
    """The questions with what the command line says of the answers, and the config where it says nothing."""
    return Questions(
        tuple(texts), args.n, args.temperature, args.top_p or 1.0, cfg.seed if args.seed is None else args.seed,
        args.max_new_tokens or cfg.eval.max_new_tokens,
    )  # fmt: skip


def answer_share(subject: Subject, questions: Questions, *, rank: int = 0, world_size: int = 1) -> dict[int, str]:
    """This process's answers by their number; answer `i` is one to question `i // samples`.

    Random numbers belong to an answer's number, so that they do not depend on the number of processes.
    """
    prepare_environment(subject.cfg)
    from sftplay.data.records import Message
    from sftplay.deliver.infer.generate import Generator, answer_all
    from sftplay.deliver.infer.sampling import Sampling

    cfg = subject.cfg
    model, tokenizer, renderer = subject.open()
    sampling = Sampling(questions.temperature, questions.top_p, questions.seed)
    generator = Generator(model, tokenizer, renderer.end_token_ids, questions.max_new_tokens, sampling)
    system = (Message("system", cfg.data.system),) if cfg.data.system else ()
    numbers = questions.share(rank, world_size)
    asked = [Message("user", questions.texts[number // questions.samples]) for number in numbers]
    prompts = [renderer.prompt_ids((*system, question), "") for question in asked]
    answers = answer_all(
        generator,
        prompts,
        batch_size=cfg.eval.batch_size,
        rows=numbers,
        progress=lambda done: log.progress(done, len(prompts), what="answered", tag="eval"),
    )
    return dict(zip(numbers, answers, strict=True))
