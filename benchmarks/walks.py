"""Files of the kit that act in what a user asks for: how many a reader opens to follow it.

    python benchmarks/walks.py [--root OTHER_CHECKOUT] [--list]

A file acts when one of its functions runs; importing it does not count. Training counts up to the end of the first
optimizer step, in the parent and in the worker.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

HOOK = """
import atexit, os, sys, threading
acted, begin, ended = set(), os.environ.get("WALK_FROM", ""), os.environ["WALK_ENDED"]
active, trains, events = not begin, False, 0
loops = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}
def watch(frame, event, arg):
    global active, trains, events
    code = frame.f_code
    if event == "call":
        trains = trains or code.co_name == "training_step"
        active = active or code.co_name == begin
        # Neither a module nor a class, nor a comprehension of a module, which an import runs.
        if active and "/sftplay/" in code.co_filename and code.co_flags & 1 and code.co_qualname not in loops:
            acted.add(code.co_filename)
        events += 1
        if events % 10000 == 0 and os.path.exists(ended):
            sys.setprofile(None)
    elif event == "return" and trains and code.co_name == "step" and "/torch/optim/" in code.co_filename:
        sys.setprofile(None)
        open(ended, "w").close()
def write():
    kind = "worker" if "sftplay.tasks.worker" in " ".join(sys.orig_argv) else "parent"
    with open(os.path.join(os.environ["WALK"], f"{kind}-{os.getpid()}"), "w") as out:
        out.write("\\n".join(name[name.rindex("/sftplay/") + 1 :] for name in acted))
if "sftplay" in " ".join(sys.orig_argv):
    sys.setprofile(watch)
    threading.setprofile(watch)
    os.register_at_fork(after_in_child=lambda: atexit.register(write))
    atexit.register(write)
"""
"""The text of a sitecustomize.py. `WALK_FROM` names a function before which nothing counts."""

SMALL = ["train.max_steps=1", "eval.before=false", "eval.after=false", "logging.backend=none"]


def main() -> int:
    """Print a Markdown table of the walks that a command shows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to walk through")
    parser.add_argument("--list", action="store_true", help="name the files")
    args = parser.parse_args()
    print("| walk | files that act | of the parent | of the worker |\n| --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        rows = home / "rows.jsonl"
        rows.write_text('{"question": "1 + 1?", "answer": "2"}\n' * 20)
        page = home / "pages"
        page.mkdir()
        write_pdf(page / "page.pdf")
        train = ["train", "--config"]
        walks = {
            "a. SFT to the first optimizer step": ([*train, "configs/run_demo.yaml", *SMALL], ""),
            "c. a jsonl row to labels": (["process", "--config", "configs/run_demo.yaml", f"data.train_path={rows}",
                                          f"data.processed_dir={home}/processed"], "load_examples"),
            "d. a GRPO reward to the gradient": ([*train, "configs/run_grpo_toy.yaml", *SMALL], "_calculate_rewards"),
            "f. a two-turn episode": ([*train, "configs/run_score_toy.yaml", *SMALL], "training_step"),
            "g. a plan of QLoRA": (["plan", "--config", "configs/run_bnb.yaml", "--gpus", "1xH100"], ""),
            "h. a page of PDF to a row": (["ingest", "--in", str(page), "--out", f"{home}/rows-of-pages.jsonl"], ""),
        }  # fmt: skip
        for name, (words, begin) in walks.items():
            if words[0] == "train":
                words = [*words, f"output_dir={home}/outputs"]
            found = walk(args.root, words, begin=begin)
            parent, worker = found.get("parent", set()), found.get("worker", set())
            print(f"| {name} | {len(parent) + len(worker)} | {len(parent)} | {len(worker)} |", flush=True)
            if args.list:
                print("\n".join(f"    {kind} {file}" for kind in found for file in sorted(found[kind])))
    return 0


def walk(root: Path, words: list[str], *, begin: str) -> dict[str, set[str]]:
    """`parent` and `worker` -> files whose functions ran in a command; a process that it starts is its parent's."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(HOOK)
        env = {**os.environ, "PYTHONPATH": folder, "WALK": folder, "WALK_FROM": begin, "WALK_ENDED": f"{folder}/ended"}
        done = subprocess.run(
            [sys.executable, "-m", "sftplay", *words], cwd=root, env=env, capture_output=True, text=True, check=False
        )
        if done.returncode:
            print(done.stdout[-2000:], done.stderr[-2000:])
        found: dict[str, set[str]] = {}
        for path in Path(folder).glob("*-*"):
            found.setdefault(path.name.partition("-")[0], set()).update(path.read_text().split())
        return found


def write_pdf(path: Path) -> None:
    """Write a page with one line of text."""
    text = b"BT /F1 12 Tf 72 720 Td (A sentence of a page that is long enough to be kept as a row of text.) Tj ET"
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>", b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Contents 4 0 R/Resources<</Font<</F1 5 0 R>>>>>>",
        b"<</Length %d>>stream\n%s\nendstream" % (len(text), text), b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]  # fmt: skip
    content, places = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        places.append(len(content))
        content += b"%d 0 obj%s endobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    end = b"xref\n0 %d\n0000000000 65535 f \n%strailer<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF\n"
    path.write_bytes(content + end % (len(objects) + 1, table, len(objects) + 1, len(content)))


if __name__ == "__main__":
    sys.exit(main())
