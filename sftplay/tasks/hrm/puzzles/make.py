"""The verb `puzzle-data`: the folder of both splits, made from files of puzzles; it appears whole or not at all."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sftplay import log
from sftplay.atomic import check_new_file, locked, unfinished_folder, whole_folder
from sftplay.data.files import SUFFIXES, find_suffix
from sftplay.data.pool import work_through
from sftplay.data.read import read_rows
from sftplay.data.records import Refused
from sftplay.errors import MOST_PROBLEMS, ConfigError, DataError, MachineError, SeveralErrors
from sftplay.machine.gpu import usable_cores
from sftplay.tasks.hrm.puzzles.arc import (
    ALPHABET,
    ASKED,
    BLANK,
    LARGEST,
    NAMES,
    ArcTask,
    Change,
    GridPair,
    as_json,
    canonical,
    on_canvas,
    read_tasks,
    sample_changes,
)
from sftplay.tasks.hrm.puzzles.folder import Cells, Group, PuzzleFolder, SplitWriter, write_folder
from sftplay.tasks.hrm.puzzles.maze import Maze
from sftplay.tasks.hrm.puzzles.sampler import make_generator
from sftplay.tasks.hrm.puzzles.sudoku import SMALL_ALPHABET, Sudoku, make_groups

QUESTION = ("q", "question", "puzzle", "puzzles", "quiz", "quizzes")
ANSWER = ("a", "answer", "solution", "solutions")
"""Names of the columns, in this order."""

FIX_LINE = "correct the line, or take it out"

PuzzleKind = Sudoku | Maze
KINDS: dict[str, PuzzleKind] = {"sudoku": Sudoku(), "maze": Maze()}


@dataclass(frozen=True)
class Puzzles:
    """The puzzles of a file, with numbers that copies of a question, or of an answer, share."""

    path: str
    lines: NDArray[np.int64]
    questions: Cells
    answers: Cells
    question_keys: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    answer_keys: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    """Both empty until `check_puzzles` has computed them."""

    def __len__(self) -> int:
        return len(self.lines)

    def take(self, rows: NDArray[Any]) -> Puzzles:
        columns: list[NDArray[Any]] = [self.lines, self.questions, self.answers, self.question_keys, self.answer_keys]
        return Puzzles(self.path, *(column[rows] if len(column) else column for column in columns))

    def place(self, row: int) -> str:
        return f"{self.path}:{self.lines[row]}"


def find_files(source: Path) -> dict[str, Path]:
    """Find `train` and `test` of a folder with files of these names, or `all` for a single file.
    Raise DataError where a folder lacks one of the two.
    """
    if not source.is_dir():
        return {"all": source}
    found = {}
    for split in ("train", "test"):
        named = [source / f"{split}{suffix}" for suffix in SUFFIXES if (source / f"{split}{suffix}").is_file()]
        if len(named) != 1:
            what = f"holds {len(named) or 'no'} file{'s' * (len(named) > 1)} called {split}"
            others = [path for path in sorted(source.iterdir()) if find_suffix(path)]
            name = f": IN={others[0]}" if len(others) == 1 else " with IN="
            fix = f"put {split}.csv or {split}.csv.gz there, or name one file, which is then split{name}"
            raise DataError(what, where=str(source), fix=fix)
        found[split] = named[0]
    return found


def read_puzzles(file: Path, kind: PuzzleKind) -> Puzzles:
    """Read all puzzles of a file; the meaning of the characters is not checked. Raise SeveralErrors for up to a hundred
    lines that hold no puzzle of this kind, DataError where the file cannot be read, or holds none.
    """
    lines, texts, problems = [], bytearray(), []
    characters = {symbol: symbol for symbol in kind.alphabet.symbols[1:]}  # with that of the alphabet
    characters |= dict.fromkeys(kind.also_blank, kind.alphabet.symbols[1])
    for line, question, answer, what in _read_texts(file, kind, allowed=set(characters)):
        if what:
            problems.append(DataError(what, where=f"{file}:{line}", fix=FIX_LINE))
            if len(problems) > MOST_PROBLEMS:
                break
        else:
            lines.append(line)
            texts += question + answer
        if len(lines) % 20_000 == 0:
            log.progress(len(lines), None, what=f"reading {file.name}", tag="puzzle-data")
    if problems:
        raise SeveralErrors(problems)
    if not lines:
        raise DataError("holds no puzzle", where=str(file), fix="name a file with a question and an answer in each row")
    table = np.zeros(256, np.uint8)
    for character, same in characters.items():
        table[ord(character)] = kind.alphabet.symbols.index(same) - 1
    cells = table[np.frombuffer(bytes(texts), np.uint8)].reshape(len(lines), 2, -1)
    return Puzzles(str(file), np.array(lines), np.ascontiguousarray(cells[:, 0]), np.ascontiguousarray(cells[:, 1]))


def _read_texts(file: Path, kind: PuzzleKind, *, allowed: set[str]) -> Iterator[tuple[int, bytes, bytes, str]]:
    """Yield line, question, answer, and what is wrong with them."""
    n_cells = kind.alphabet.shape[0] * kind.alphabet.shape[1]
    for source, row in read_rows(str(file)):
        if isinstance(row, Refused):
            yield source.line, b"", b"", row.reason
            continue
        question, answer = (next((row[name] for name in names if name in row), None) for names in (QUESTION, ANSWER))
        if question is None or answer is None:
            name, names = ("question", QUESTION) if question is None else ("answer", ANSWER)
            what = f"has no {name}: its columns are {', '.join(row)}"
            raise DataError(what, where=f"{file}:{source.line}", fix=f"call the column one of {', '.join(names)}")
        what = _find_flaw("question", question, allowed=allowed, n_cells=n_cells)
        what = what or _find_flaw("answer", answer, allowed=allowed, n_cells=n_cells)
        yield source.line, *((b"", b"") if what else (question.encode(), answer.encode())), what


def _find_flaw(name: str, text: Any, *, allowed: set[str], n_cells: int) -> str:
    if not isinstance(text, str):
        return f"the {name} is {text!r}, no text"
    if len(text) != n_cells:
        return f"the {name} has {len(text)} characters, not {n_cells}"
    if not allowed.issuperset(text):
        place = next(place for place, character in enumerate(text, 1) if character not in allowed)
        return f"the {name} holds {text[place - 1]!r} at {place}; a cell is one of {''.join(sorted(allowed))!r}"
    return ""


@dataclass(frozen=True, kw_only=True)
class PuzzleSettings:
    kind: str
    source: Path | None
    """A file or a folder; None for puzzles that need none."""

    out: Path
    copies: int | None = None
    """Augmented copies of each original; None takes the kind's usual number."""

    seed: int = 0
    subsample: int | None = None
    """Number of training puzzles to sample; None takes all."""

    held_out: float = 0.1
    """The share of the solutions of a single file that goes to the test."""

    workers: int = 1


CHUNK_PUZZLES = 2048
"""Puzzles that a process checks at once."""

WORTH_WORKERS = 8 * CHUNK_PUZZLES
"""Below this number of puzzles, starting processes takes longer than the work."""


def check_puzzles(puzzles: Puzzles, kind: PuzzleKind, *, workers: int) -> Puzzles:
    """Return puzzles with keys; raise SeveralErrors, with file and line, for up to a hundred that cannot be used."""
    name, total = kind.alphabet.kind, len(puzzles)
    starts = range(0, total, CHUNK_PUZZLES)
    parts = (slice(at, at + CHUNK_PUZZLES) for at in starts)
    chunks = ((name, puzzles.questions[part], puzzles.answers[part]) for part in parts)
    parallel = work_through(chunks, check_chunk, processes=workers, killed=killed_process())
    outcomes = parallel if workers > 1 and total >= WORTH_WORKERS else map(check_chunk, chunks)
    problems, keys = [], []
    for start, (found, marks) in zip(starts, outcomes, strict=True):
        problems += [DataError(what, where=puzzles.place(start + row), fix=FIX_LINE) for row, what in found]
        keys.append(marks)
        log.progress(min(start + CHUNK_PUZZLES, total), total, what=f"checking {puzzles.path}", tag="puzzle-data")
        if len(problems) > MOST_PROBLEMS:
            break
    parallel.close()
    if problems:
        raise SeveralErrors(problems)
    question_keys, answer_keys = (np.concatenate(parts) for parts in zip(*keys, strict=True))
    return replace(puzzles, question_keys=question_keys, answer_keys=answer_keys)


def killed_process() -> MachineError:
    fix = "free memory, or take fewer processes with --workers"
    return MachineError("a process that prepares puzzles was killed from outside", where="puzzle-data", fix=fix)


def check_chunk(chunk: tuple[str, Cells, Cells]) -> tuple[list[tuple[int, str]], tuple[NDArray[np.uint64], ...]]:
    """Return the problems of a chunk, or the keys of its questions and answers if it has none."""
    name, questions, answers = chunk
    kind = KINDS[name]
    if problems := list(kind.problems(questions, answers)):
        return problems, ()
    return [], (kind.question_keys(questions), kind.answer_keys(answers))


def check_held_out(train: Puzzles, test: Puzzles, *, kind: PuzzleKind) -> None:
    """Raise SeveralErrors, each with both lines, where a question of the test is a copy of one of training."""
    order = np.argsort(train.question_keys, kind="stable")
    sorted_keys = train.question_keys[order]
    begins, ends = (np.searchsorted(sorted_keys, test.question_keys, side=side) for side in ("left", "right"))
    problems = []
    for row in np.flatnonzero(ends > begins).tolist():
        question, others = test.questions[row], order[begins[row] : ends[row]].tolist()
        like = next((other for other in others if kind.is_copy(train.questions[other], question)), None)
        if like is not None:
            what = f"is a copy of the training puzzle {train.place(like)}"
            problems.append(DataError(what, where=test.place(row), fix="take one of the two out"))
        if len(problems) > MOST_PROBLEMS:
            break
    if problems:
        raise SeveralErrors(problems)


def write_rows(settings: PuzzleSettings, folder: Path) -> dict[str, Any]:
    """Write the splits `train` and `test` below `folder`; return what the report adds to their counts.
    Raise ConfigError where a setting does not fit the data, DataError where a file cannot be used.
    """
    kind = KINDS[settings.kind]
    copies = kind.copies if settings.copies is None else settings.copies
    if kind.most_copies is not None and copies > kind.most_copies:
        what = f"is {copies:,}; a {settings.kind} has {kind.most_copies} copies that differ"
        raise ConfigError(what, where="--aug", fix=f"take up to {kind.most_copies}")
    assert settings.source is not None
    train, test = _read_splits(settings, kind, files=find_files(settings.source))
    check_held_out(train, test, kind=kind)
    for split, puzzles, n in (("train", train, copies), ("test", test, 0)):
        (folder / split).mkdir()
        groups = _make_groups(puzzles, kind, copies=n, seed=settings.seed, split=split)
        write_folder(folder / split, groups, alphabet=kind.alphabet)
    shared = int(np.isin(test.answer_keys, train.answer_keys).sum())
    return {"copies": copies, "test_puzzles_with_a_training_solution": shared}


def _read_splits(settings: PuzzleSettings, kind: PuzzleKind, *, files: dict[str, Path]) -> tuple[Puzzles, Puzzles]:
    """Read the puzzles of training and of the test, and check that all can be used."""
    workers = settings.workers
    if "all" not in files:
        train = read_puzzles(files["train"], kind)
        train = train.take(_choose_rows(len(train), settings))
        test = read_puzzles(files["test"], kind)
        return check_puzzles(train, kind, workers=workers), check_puzzles(test, kind, workers=workers)
    everything = check_puzzles(read_puzzles(files["all"], kind), kind, workers=workers)
    # The solution alone decides, so that all puzzles with one solution are on one side.
    solutions, back = np.unique(everything.answer_keys, return_inverse=True)
    numbers = [make_generator(solution.tobytes(), settings.seed).random() for solution in solutions]
    is_test = (np.array(numbers) < settings.held_out)[back]
    if is_test.all() or not is_test.any():
        side = "training" if is_test.all() else "the test"
        what = f"leaves no puzzle for {side}: {len(everything):,} puzzles, a share of {settings.held_out:g} held out"
        raise DataError(what, where=everything.path, fix="name more puzzles, or another share with --held-out")
    rows = np.flatnonzero(~is_test)
    rows = rows[_choose_rows(len(rows), settings)]
    return everything.take(rows), everything.take(is_test)


def _choose_rows(n: int, settings: PuzzleSettings) -> NDArray[np.int64]:
    """Choose the training puzzles that are used, in the order of the file."""
    if settings.subsample is None:
        return np.arange(n)
    if not 0 < settings.subsample <= n:
        what = f"is {settings.subsample:,}; there are {n:,} training puzzles"
        raise ConfigError(what, where="--subsample", fix=f"take 1 to {n}, or leave it out")
    return np.sort(make_generator(b"subsample", settings.seed).permutation(n)[: settings.subsample])


def _make_groups(puzzles: Puzzles, kind: PuzzleKind, *, copies: int, seed: int, split: str) -> Iterator[Group]:
    """Yield each original with its copies behind it, as tokens."""
    for done, (question, answer) in enumerate(zip(puzzles.questions, puzzles.answers, strict=True), 1):
        pair = np.stack([question, answer])
        none = (pair[:0], pair[:0])
        made = kind.make_copies(pair, copies, stream=make_generator(question.tobytes(), seed)) if copies else none
        inputs, labels = (np.concatenate([one[None], more]) + np.uint8(1) for one, more in zip(pair, made, strict=True))
        yield Group(inputs, labels)
        if done % 100 == 0 or done == len(puzzles):
            log.progress(done, len(puzzles), what=f"writing {split}", tag="puzzle-data")


COPIES_WORTH_WORKERS = 2000
"""Below this number of copies in all, starting processes takes longer than the work."""


def write_tasks(settings: PuzzleSettings, folder: Path) -> dict[str, Any]:
    """Write the splits `train` and `test` below `folder`, and what `arc_votes` reads; return what the report adds.
    Raise ConfigError where a setting does not fit, DataError where a file holds no task, or a task is in both parts.

    Training has all pairs of the training tasks and the demonstrations of the evaluation tasks, the test has the test
    pairs of the evaluation tasks, both with all copies. A task has the same identifiers in both. HRM and TRM divide
    the pairs so (dataset/build_arc_dataset.py).
    """
    assert settings.source is not None
    if settings.subsample is not None:
        raise ConfigError("does not fit ARC: take json files out instead", where="--subsample", fix="leave it out")
    copies = 1000 if settings.copies is None else settings.copies
    parts = []
    for part in ("training", "evaluation"):
        # Below IN, or below its `data`, as ARC's own repository has it.
        places = (settings.source / part, settings.source / "data" / part)
        parts.append(read_tasks(next((path for path in places if path.is_dir()), places[0])))
    training, evaluation = parts
    repeated = check_tasks(training, evaluation)
    jobs = [(task, copies, settings.seed, False) for task in training]
    jobs += [(task, copies, settings.seed, True) for task in evaluation]
    writers = {}
    for split in ("train", "test"):
        (folder / split).mkdir()
        writers[split] = SplitWriter(folder / split, ALPHABET)
    names = [BLANK]
    parallel = work_through(jobs, make_copies, processes=settings.workers, killed=killed_process())
    is_worth = settings.workers > 1 and copies * len(jobs) >= COPIES_WORTH_WORKERS
    for done, (copied, train, test) in enumerate(parallel if is_worth else map(make_copies, jobs), 1):
        identifiers = range(len(names), len(names) + len(copied))
        names += copied
        for split, group in (("train", train), ("test", test)):
            if group is not None:
                writers[split].add(Group(group.inputs, group.labels, group.sizes, identifiers))
        log.progress(done, len(jobs), what="writing tasks", tag="puzzle-data")
    for writer in writers.values():
        writer.finish(len(names))
    (folder / NAMES).write_text(json.dumps(names), encoding="utf-8")
    (folder / ASKED).write_text(json.dumps({task.id: as_json(task) for task in evaluation}), encoding="utf-8")
    return {"copies": copies, "training_tasks": len(training), "evaluation_tasks": len(evaluation), **repeated}


def check_tasks(training: list[ArcTask], evaluation: list[ArcTask]) -> dict[str, Any]:
    """Report the test pairs of the evaluation that are copies of a learned pair, of their own task or of another.
    Raise SeveralErrors where tasks of training and of the evaluation have one name.

    Published tasks have both: of ARC-AGI-1 a pair of 50a16a69 is one of caa06a1f in other colours, and each pair of
    070dd51e is one of 40853293.
    """
    both = {task.id for task in training} & {task.id for task in evaluation}
    if both:
        what, fix = "is a task of training and of the evaluation", "take one of them out"
        raise SeveralErrors([DataError(what, where=name, fix=fix) for name in sorted(both)])
    learned: dict[bytes, set[str]] = {}
    for task, pairs in [(t, t.pairs) for t in training] + [(t, t.train) for t in evaluation]:
        for pair in pairs:
            learned.setdefault(canonical(pair), set()).add(task.id)
    demonstrated, others = 0, []
    for task in evaluation:
        like = [learned.get(canonical(pair), set()) for pair in task.test]
        demonstrated += sum(task.id in names for names in like)
        others += [
            {"task": task.id, "test_pair": number, "like": sorted(names - {task.id})}
            for number, names in enumerate(like, 1)
            if names - {task.id}
        ]
    counts = {"test_pairs_like_a_demonstration": demonstrated, "test_pairs_like_another_task": len(others)}
    return {**counts, "like_another_task": others}


def make_copies(job: tuple[ArcTask, int, int, bool]) -> tuple[list[str], Group, Group | None]:
    """Return the names of a task's copies, and them as tokens: of the pairs for training, and of those for the test.

    `job` is the task, the number of its copies, the seed, and whether its test pairs go to the test. Learned pairs lie
    anywhere on the canvas, asked ones in its corner.
    """
    task, copies, seed, is_asked = job
    stream = make_generator(task.id.encode(), seed)
    changes = sample_changes(task, copies, stream=stream)
    learned = task.train if is_asked else task.pairs
    rows = [row for change in changes for row in _place_pairs(learned, change, stream=stream)]
    train, test = _to_group(rows, [len(learned)] * len(changes)), None
    if is_asked:
        rows = [(change, pair, 0, 0) for change in changes for pair in task.test]
        test = _to_group(rows, [len(task.test)] * len(changes))
    return [change.name(task.id) for change in changes], train, test


PlacedPair = tuple[Change, GridPair, int, int]
"""A pair with its change, and the row and column of its corner."""


def _place_pairs(pairs: tuple[GridPair, ...], change: Change, *, stream: np.random.Generator) -> list[PlacedPair]:
    """Return the pairs of a copy at random places; one of them stays in the corner, where the test pairs lie."""
    stays = int(stream.integers(len(pairs)))
    placed = []
    for number, pair in enumerate(pairs):
        shapes = [change.apply(grid).shape for grid in (pair.input, pair.output)]
        room = [LARGEST + 1 - max(shape[axis] for shape in shapes) for axis in (0, 1)]
        top, left = (int(stream.integers(size)) for size in room)
        placed.append((change, pair, 0, 0) if number == stays else (change, pair, top, left))
    return placed


def _to_group(rows: list[PlacedPair], sizes: list[int]) -> Group:
    inputs, labels = (
        np.stack([on_canvas(change.apply(getattr(pair, side)), top=top, left=left) for change, pair, top, left in rows])
        for side in ("input", "output")
    )
    return Group(inputs, labels, sizes)


def make_folder(settings: PuzzleSettings) -> dict[str, Any]:
    """Write `settings.out` with both splits and a report; return the report.
    Raise ConfigError where the folder is there already, or another command is writing it; DataError, without a folder,
    where the puzzles cannot be used.
    """
    if settings.kind == "sudoku4" and settings.source is not None:
        raise ConfigError("is not read for sudoku4", where="--in", fix="leave it out; sudoku4 is made here")
    if settings.kind == "sudoku4" and (settings.copies is not None or settings.subsample is not None):
        name = "--aug" if settings.copies is not None else "--subsample"
        raise ConfigError("does not fit sudoku4: its puzzles and copies are fixed", where=name, fix="leave it out")
    if settings.kind != "sudoku4" and settings.source is None:
        what = f"{settings.kind} puzzles are read from files"
        raise ConfigError(what, where="--in", fix="name a file or a folder with IN=")
    if settings.source is not None and not settings.source.exists():
        raise DataError("no such file or folder", where=str(settings.source), fix="correct IN=")
    check_new_file(settings.out)
    lock = unfinished_folder(settings.out).with_suffix(".lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    try:
        with locked(lock, waits=False), ExitStack() as at_end:
            at_end.callback(lock.unlink, missing_ok=True)
            check_new_file(settings.out)  # another command may have made it meanwhile
            with whole_folder(settings.out) as folder:
                return _write(settings, folder)
    except BlockingIOError:
        fix = "wait for it, or choose another folder with OUT="
        raise ConfigError("another command is writing it", where=str(settings.out), fix=fix) from None


def _write(settings: PuzzleSettings, folder: Path) -> dict[str, Any]:
    if settings.kind == "arc":
        more = write_tasks(settings, folder)
    elif settings.kind == "sudoku4":
        more = {}
        for split, groups in make_groups(settings.seed).items():
            (folder / split).mkdir()
            write_folder(folder / split, groups, alphabet=SMALL_ALPHABET)
    else:
        more = write_rows(settings, folder)
    source = None if settings.source is None else str(settings.source)
    report = {"kind": settings.kind, "source": source, "seed": settings.seed, **more}
    for split in ("train", "test"):
        written = PuzzleFolder.open(folder / split)  # the files are read back
        n_puzzles = sum(len(puzzle_set.puzzle_identifiers) for puzzle_set in written.sets)
        identifiers = written.facts.num_puzzle_identifiers
        counts = {"groups": written.facts.total_groups, "puzzles": n_puzzles, "examples": len(written)}
        report[split] = {**counts, "identifiers": identifiers}
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


SHOWN_SOURCES = 5  # repeated pairs of ARC that are named on the terminal; the report names all


def puzzle_data(args: Namespace) -> int:
    """`puzzle-data`: check all puzzles, write both splits; the counts, or the report as JSON."""
    if args.overrides:
        what = f"{args.overrides[0]!r} is no setting of puzzle-data, which has no config"
        raise ConfigError(what, where="command line", fix="see `python -m sftplay puzzle-data --help`")
    settings = PuzzleSettings(
        kind=args.kind, source=Path(args.input) if args.input else None, out=Path(args.out), copies=args.aug,
        seed=args.seed, subsample=args.subsample, held_out=args.held_out, workers=args.workers or usable_cores(),
    )  # fmt: skip
    report = make_folder(settings)
    if args.json:
        print(json.dumps(report))
        return 0
    for split in ("train", "test"):
        counts = report[split]
        identifiers = f", {counts['identifiers']:,} identifiers" if counts["identifiers"] > 1 else ""
        text = f"{counts['groups']:,} originals, {counts['puzzles']:,} with their copies, {counts['examples']:,}"
        log.say(f"{split:5} {text} examples{identifiers}", "puzzle-data")
    copies, others = report.get("test_pairs_like_a_demonstration"), report.get("like_another_task", [])
    if copies:
        log.say(f"note: {copies:,} test pairs are copies of a demonstration of their own task", "puzzle-data")
    if others:
        named = ", ".join(f"{pair['task']} like {' '.join(pair['like'])}" for pair in others[:SHOWN_SOURCES])
        more = f" and {len(others) - SHOWN_SOURCES:,} more" if len(others) > SHOWN_SOURCES else ""
        log.say(f"note: {len(others):,} test pairs are copies of a pair of another task: {named}{more}", "puzzle-data")
    if not copies and not others:
        log.say("no puzzle of the test is a copy of one of training", "puzzle-data")
    if shared := report.get("test_puzzles_with_a_training_solution"):
        log.say(f"note: {shared:,} puzzles of the test share their solution with one of training", "puzzle-data")
    log.say(f"{settings.out}: set data.train_path and data.val_path to it", "puzzle-data")
    return 0
