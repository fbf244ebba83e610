"""A file is answered batch by batch: nothing is asked twice, whatever ends it, and neighbours change no answer."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import Finished, Inputs, train
from lively import lively_model
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from sftplay import cli
from sftplay.errors import ConfigError, DataError, RunError
from sftplay.generate import batch
from sftplay.generate import prompts as questions
from sftplay.generate.generate import Generator, SampleByRow, Sampling, answer_all, answer_batch
from sftplay.generate.partial_answers import PartialAnswers
from sftplay.generate.prompts import PromptFile

pytestmark = pytest.mark.usefixtures("verbs_environment")

ROOT = Path(__file__).resolve().parents[2]
END = 2
LENGTHS = (9, 2, 25, 1, 14, 9, 3, 18, 30, 5)


@pytest.fixture(scope="module")
def tokenizer(tiny_llama: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_llama)


@pytest.fixture(scope="module")
def llama(tiny_llama: Path) -> Any:
    return lively_model(tiny_llama)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Its positions are learned one by one, so that padding shows where they are counted from."""
    config = GPT2Config(
        vocab_size=400, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=None, eos_token_id=END
    )
    folder = tmp_path_factory.mktemp("gpt2")
    GPT2LMHeadModel(config).save_pretrained(folder)
    return lively_model(folder)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    torch.manual_seed(1)
    return [torch.randint(3, 400, (n,)).tolist() for n in LENGTHS]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_greedy_answers_are_those_of_plain_transformers_to_each_prompt_alone(
    name: str, batch_size: int, tokenizer: Any, prompts: list[list[int]], request: pytest.FixtureRequest
):
    model = request.getfixturevalue(name)
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            out = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12,
                eos_token_id=END, pad_token_id=0,
            )  # fmt: skip
        expected.append(tokenizer.decode(out[0, len(prompt) :], skip_special_tokens=True))
    assert len(set(expected)) == len(prompts)
    assert answer_all(Generator(model, tokenizer, [END], 12), prompts, batch_size=batch_size) == expected


def test_what_is_drawn_for_a_row_does_not_depend_on_its_neighbours(
    llama: Any, tokenizer: Any, prompts: list[list[int]]
):
    def answers(seed: int, batch_size: int) -> list[str]:
        generator = Generator(llama, tokenizer, [END], 12, Sampling(temperature=1.5, top_p=0.9, seed=seed))
        return answer_all(generator, prompts, batch_size=batch_size)

    first = answers(7, 10)
    assert answers(7, 1) == answers(7, 3) == first
    greedy = answer_all(Generator(llama, tokenizer, [END], 12), prompts, batch_size=10)
    assert sum(a == b for a, b in zip(answers(8, 10), first, strict=True)) <= 1
    assert sum(a == b for a, b in zip(greedy, first, strict=True)) <= 1


@pytest.mark.parametrize(
    ("temperature", "top_p", "expected"),
    [
        # Shares 0.1, 0.2, 0.3, 0.4 by hand; temperature 0.5 squares them: 1, 4, 9, 16 of 30.
        (1.0, 1.0, [0.1, 0.2, 0.3, 0.4]),
        (0.5, 1.0, [1 / 30, 4 / 30, 9 / 30, 16 / 30]),
        # The likeliest that sum up to 0.6 are the last two.
        (1.0, 0.6, [0.0, 0.0, 3 / 7, 4 / 7]),
    ],
)
def test_tokens_are_drawn_as_often_as_temperature_and_top_p_say(
    temperature: float, top_p: float, expected: list[float]
):
    n = 20_000
    scores = torch.tensor([0.1, 0.2, 0.3, 0.4]).log().expand(n, 4)
    sampled = Sampling(temperature, top_p, seed=3).processors(range(n))(torch.zeros(n, 1, dtype=torch.long), scores)
    assert bool((sampled.isfinite().sum(-1) == 1).all())
    shares = torch.bincount(sampled.argmax(-1), minlength=4) / n
    # Five standard errors of a share of 0.5.
    assert shares.tolist() == pytest.approx(expected, abs=5 * 0.5 / n**0.5)
    assert [share for share, wanted in zip(shares.tolist(), expected, strict=True) if not wanted and share] == []


def test_no_token_that_was_cut_off_is_drawn_at_either_end(monkeypatch: pytest.MonkeyPatch):
    # Of torch's random numbers, 0 is at the end of the first token's part, which is empty here.
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda numbers, **_: numbers.zero_())
    scores = torch.tensor([[-torch.inf, 0.0, -torch.inf]])
    sampled = SampleByRow(seed=1, rows=[0])(torch.zeros(1, 1, dtype=torch.long), scores)
    assert sampled.argmax(-1).tolist() == [1]


FINGERPRINT = {"input": "abc", "temperature": 0.5}


def partial(tmp_path: Path, **changes: Any) -> PartialAnswers:
    return PartialAnswers(tmp_path / "out.jsonl", FINGERPRINT | changes)


def test_stored_answers_are_read_back_and_continue_after_a_torn_line(tmp_path: Path):
    first, second, third = [(2, "zwei\n"), (0, "ünï\u2028")], [(1, "")], [(3, "\ud800")]
    with partial(tmp_path).held() as stored:
        stored.append(first)
        stored.append(second)
    kept = stored.path.read_bytes()
    for torn in (b"", b'[[3, "dr', b'[[3, "drei"]]', b"[[3,\n"):
        stored.path.write_bytes(kept + torn)
        with partial(tmp_path).held() as stored:
            assert (stored.n_batches, stored.n_answers) == (2, 3)
            stored.append(third)
        assert list(stored.answers()) == [first, second, third]


@pytest.mark.parametrize("content", [b"mine, all mine", b'{"answers of": 3}\n', b'{"a": 1}\n[]\n'])
def test_a_foreign_file_of_the_same_name_is_left_alone(tmp_path: Path, content: bytes):
    stored = partial(tmp_path)
    stored.path.write_bytes(content)
    with pytest.raises(ConfigError, match="is in the way"):
        with stored.held():
            pass
    assert stored.path.read_bytes() == content


def test_a_full_disk_ends_with_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real = os.write

    def write(file: int, data: bytes) -> int:
        if len(data) > 100:
            return real(file, data[:50])
        raise OSError(28, "No space left on device")

    with partial(tmp_path).held() as stored:
        stored.append([(0, "a")])
        monkeypatch.setattr("sftplay.generate.partial_answers.os.write", write)
        with pytest.raises(RunError, match=r"No space left on device.*; 1 answers are kept"):
            stored.append([(1, "b" * 120)])
    monkeypatch.undo()
    with partial(tmp_path).held() as stored:
        assert stored.n_answers == 1


@pytest.fixture(scope="module")
def run(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    home = tmp_path_factory.mktemp("batch")
    return train(
        home, inputs, train__max_steps=1, train__learning_rate=0.05, eval__batch_size=3, eval__max_new_tokens=6
    )


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """20 rows of many lengths: two windows, where a window has four batches of three rows."""
    path = tmp_path / "in.jsonl"
    arguments = ["why", "old", "boats", "carry", "salt", "over", "quiet", "hills", "and", "green", "stone"]
    path.write_text(
        "".join(json.dumps({"id": n, "prompt": f"{n} " + " ".join(arguments[: n * 7 % 11])}) + "\n" for n in range(20))
    )
    return path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the rows that the model is asked from here on, in small windows."""
    row_numbers: list[int] = []

    def answer_and_note(generator: Generator, prompts: list[list[int]], *, rows: list[int]) -> list[str]:
        row_numbers.extend(rows)
        return answer_batch(generator, prompts, rows=rows)

    monkeypatch.setattr(batch, "answer_batch", answer_and_note)
    monkeypatch.setattr(questions, "BATCHES_IN_WINDOW", 4)
    return row_numbers


def infer_batch(run: Finished, rows: Path, out: Path, *arguments: str) -> int:
    config = run.folder.path.parents[1] / "run.yaml"
    return cli.main(["infer-batch", "--config", str(config), "--in", str(rows), "--out", str(out), *arguments])


@pytest.mark.parametrize("arguments", [(), ("--temperature", "1.5")], ids=["greedy", "sampled"])
def test_a_second_start_asks_only_the_rest_and_gives_the_same_answers(
    run: Finished, rows: Path, asked: list[int], tmp_path: Path, arguments: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
):  # fmt: skip
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert infer_batch(run, rows, whole, *arguments) == 0
    plan = list(asked)
    assert sorted(plan) == list(range(20))
    assert sorted(plan[:12]) == list(range(12))
    real = batch.answer_batch
    for n_rows in (9, 15):  # within the first window, then within the second
        asked.clear()
        budget = n_rows - (9 if n_rows == 15 else 0)

        def answer_some(*of: Any, budget: int = budget, **named: Any) -> list[str]:
            if len(asked) >= budget:
                raise KeyboardInterrupt
            return real(*of, **named)

        monkeypatch.setattr(batch, "answer_batch", answer_some)
        assert infer_batch(run, rows, out, *arguments) == 130
        assert not out.exists()
        assert asked == plan[n_rows - budget : n_rows]
    monkeypatch.setattr(batch, "answer_batch", real)
    asked.clear()
    capsys.readouterr()
    assert infer_batch(run, rows, out, "--json", *arguments) == 0
    output = capsys.readouterr()
    assert json.loads(output.out) == {"answers": 20, "kept": 15, "out": str(out)}
    assert "holds 15 of 20 answers" in output.err
    assert asked == plan[15:]
    assert out.read_text() == whole.read_text()
    answered = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["id"] for row in answered] == list(range(20))
    assert len({row["response"] for row in answered}) > 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "whole.jsonl"]


def test_a_second_start_refuses_other_rows_settings_or_weights(
    run: Finished, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "out.jsonl"

    def stop(*_: Any, **__: Any) -> list[str]:
        raise KeyboardInterrupt

    real = batch.answer_batch
    monkeypatch.setattr(batch, "answer_batch", lambda *of, **kw: stop() if (tmp_path / "out.jsonl.part").stat().st_size
                        else real(*of, **kw))  # fmt: skip
    assert infer_batch(run, rows, out) == 130

    def refused(*arguments: str) -> str:
        capsys.readouterr()
        assert infer_batch(run, rows, out, *arguments) == 2
        return capsys.readouterr().err

    assert "temperature was 0.0 and is 1.0 now" in refused("--temperature", "1")
    assert "max_new_tokens was 6 and is 5 now" in refused("--max-new-tokens", "5")
    assert "batch_size was 3 and is 4 now" in refused("eval.batch_size=4")
    weights = run.folder.path / "adapter" / "adapter_model.safetensors"
    times = weights.stat()
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns + 10**10))
    assert "run was" in refused()
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    rows.write_text(rows.read_text().replace("why", "who"))
    assert "input was" in refused()
    assert not out.exists()


def test_a_row_too_long_for_the_model_is_refused_by_its_place_before_any_is_answered(
    run: Finished, tmp_path: Path, asked: list[int], capsys: pytest.CaptureFixture[str]
):
    tokenizer = AutoTokenizer.from_pretrained(run.folder.path / "adapter")
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "why"}\n' + json.dumps({"prompt": "seven " * 490}) + "\n")
    turns = [{"role": "user", "content": "seven " * 490}]
    n_tokens = len(tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False))
    assert n_tokens < 512
    room = 512 - n_tokens  # the model reads 512
    assert infer_batch(run, source, out, "--max-new-tokens", str(room + 1)) == 4
    message = capsys.readouterr().err
    assert f"{source}:2" in message
    assert f"has {n_tokens} tokens" in message
    assert asked == []
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
    assert infer_batch(run, source, out, "--max-new-tokens", str(room)) == 0


@pytest.mark.contract
@pytest.mark.parametrize(
    ("out", "arguments", "message"),
    [
        ("in.jsonl", [], "is the file with the rows themselves"),
        ("", [], "is a folder"),
        ("out.csv", [], "is to hold lines of JSON"),
        ("in.jsonl/out.jsonl", [], "cannot be written"),
        ("out.jsonl", ["--top-p", "0.5"], "has no effect: at temperature 0"),
        ("out.jsonl", ["--seed", "0"], "has no effect: at temperature 0"),
    ],
)
def test_contradictory_arguments_are_refused_and_the_rows_stay(
    run: Finished, rows: Path, capsys: pytest.CaptureFixture[str], out: str, arguments: list[str], message: str
):
    before = rows.read_bytes()
    assert infer_batch(run, rows, rows.parent / out, *arguments) in (2, 3)
    assert message in capsys.readouterr().err
    assert rows.read_bytes() == before


def test_rows_that_change_while_they_are_answered_are_noticed(
    run: Finished, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def change(_: Any, prompts: Any, **__: Any) -> list[str]:
        rows.write_text(rows.read_text() + "\n")
        return [""] * len(prompts)

    monkeypatch.setattr(batch, "answer_batch", change)
    assert infer_batch(run, rows, tmp_path / "out.jsonl") == 4
    assert "has changed while it was being answered" in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


def test_a_text_file_has_a_question_in_each_line(tmp_path: Path):
    (tmp_path / "in.TXT").write_bytes("\ufeffWhy?\r\n\n  How much is é?\nlast".encode())
    found = list(PromptFile(str(tmp_path / "in.TXT")))
    assert [(prompt.source.line, prompt.messages[-1].content) for prompt in found] == [
        (1, "Why?"), (3, "  How much is é?"), (4, "last"),
    ]  # fmt: skip
    assert found[0].row == {"prompt": "Why?"}
    before = PromptFile(str(tmp_path / "in.TXT")).digest()
    (tmp_path / "in.TXT").write_text("other")
    assert PromptFile(str(tmp_path / "in.TXT")).digest() != before


@pytest.mark.parametrize(
    ("row", "fix"),
    [
        ('{"prompt": ""}', "correct the row"),
        ('{"ask": "why"}', "name the question with one of .* 'question'"),
        ("{", "correct the row"),
    ],
)
def test_a_row_that_cannot_be_asked_is_refused_without_the_remedies_of_a_training(row: str, fix: str, tmp_path: Path):
    (tmp_path / "in.jsonl").write_text(f'{{"prompt": "why"}}\n{row}\n')
    with pytest.raises(DataError) as refusal:
        list(PromptFile(str(tmp_path / "in.jsonl")))
    assert refusal.value.where == f"{tmp_path}/in.jsonl:2"
    assert re.fullmatch(fix, refusal.value.fix)
