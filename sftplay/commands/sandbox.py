"""The verb `sandbox`: programs in, verdicts out; or every attack of the suite on this machine."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from sftplay import log
from sftplay.atomic import whole_file, write_text
from sftplay.errors import ConfigError, DataError, MachineError, RunError

if TYPE_CHECKING:
    from sftplay.sandbox.boxes.job import Job

BEGIN, END = "<!-- attacks: written by the self-test -->", "<!-- end of attacks -->"
"""Marks in a page, between which the self-test writes its list."""


def sandbox(args: Namespace) -> int:
    """`sandbox`: a job a line on standard input, its verdict on the same line of standard output."""
    if args.self_test:
        return self_test(args)
    from sftplay.sandbox.pool import Sandbox

    with ExitStack() as stack:
        source, target = sys.stdin, sys.stdout
        if args.input:
            try:
                source = stack.enter_context(Path(args.input).open(encoding="utf-8"))
            except OSError as error:
                fix = "name a file with one job a line"
                raise DataError(f"cannot be read ({error.strerror})", where=args.input, fix=fix) from error
        packages = [name for name in args.packages.split(",") if name]
        box = stack.enter_context(
            Sandbox(args.executor, workers=args.workers, is_warm=not args.fresh, packages=packages)
        )
        if args.out:  # it takes the place of what is there when all is written: that may be the jobs themselves
            scratch = stack.enter_context(whole_file(Path(args.out)))
            target = stack.enter_context(scratch.open("w", encoding="utf-8"))
        jobs, statuses = read_jobs(source, timeout_s=args.timeout, name=args.input or "standard input"), Counter[str]()
        while batch := list(islice(jobs, 256)):
            for verdict in box.run(batch):
                target.write(json.dumps(verdict.as_dict(), ensure_ascii=False) + "\n")
                statuses[verdict.status] += 1
            target.flush()
    if args.json and args.out:
        print(json.dumps({"out": args.out, "verdicts": statuses.total(), "statuses": statuses}))
    return 0


def read_jobs(source: TextIO, *, timeout_s: float, name: str) -> Iterator[Job]:
    """The jobs of JSON lines; empty lines are no jobs. Raises DataError if a line holds no job; the error names it, and
    the file by its `name`.
    """
    from sftplay.sandbox.boxes.job import Limits, job_from_dict

    limits = Limits(timeout_s=timeout_s, test_timeout_s=min(timeout_s, Limits().test_timeout_s))
    if isinstance(source, TextIOWrapper):  # a program may have any bytes
        source.reconfigure(encoding="utf-8", errors="surrogateescape")
    for number, line in enumerate(source, start=1):
        if not line.strip():
            continue
        try:
            yield job_from_dict(json.loads(line), limits=limits)
        except (ValueError, RecursionError) as error:
            raise DataError(f"is no JSON ({error})", where=f"{name}:{number}", fix="write one job a line") from error
        except DataError as error:
            where = f"{name}:{number}, {error.where}" if error.where else f"{name}:{number}"
            raise DataError(error.what, where=where, fix=error.fix, nearest=error.nearest) from error


def self_test(args: Namespace) -> int:
    """`sandbox --self-test`: every attack on every executor that is here; code 5 where one gets through."""
    from sftplay.sandbox.attacks.suite import Row, format_list, read_attacks, run_attacks
    from sftplay.sandbox.pool import SAFE, WARM, choose_executor, find_problem

    if args.executor == "none":
        raise ConfigError("has no box to test", where="--executor none", fix="leave --executor out")
    rows: dict[str, list[Row]] = {}
    for name, is_warm in [(name, is_warm) for name in SAFE for is_warm in (False, True)]:
        if args.executor not in ("auto", name) or (is_warm and name not in WARM):
            continue
        column = f"{name}, warm" if is_warm else name
        if problem := find_problem(name, is_warm=is_warm):
            log.show_error(f"{column}: {problem}")
            continue
        executor = (WARM if is_warm else SAFE)[name]()
        done: list[Row] = []

        def note(row: Row, *, column: str = column, done: list[Row] = done) -> None:
            done.append(row)
            log.progress(len(done), len(read_attacks()), what="attacks", tag=column)

        rows[column] = run_attacks(executor, note=note)
        executor.close()
    if not rows:
        choose_executor(args.executor, is_warm=False)  # says why, and what to install
        raise MachineError("no executor is here", where="sandbox")
    text = format_list(rows)
    if args.out:  # a file with the marks keeps all that is outside of them
        before = Path(args.out).read_text(encoding="utf-8") if Path(args.out).exists() else ""
        head, mark, rest = before.partition(BEGIN)
        if mark and END in rest:
            text = f"{head}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}".rstrip("\n")
        write_text(Path(args.out), text + "\n")
    else:
        log.show(text)
    through = [f"{name}: {row.attack.name}" for name, several in rows.items() for row in several if row.problems]
    held = sum(len(several) for several in rows.values()) - len(through)
    if args.json:
        print(json.dumps({"held": held, "through": through}))
    log.show(f"{held} attempts held, {len(through)} got through{': ' if through else ''}{'; '.join(through)}")
    return RunError.exit_code if through else 0
