"""Several runs on one page: what was set differently, their figures side by side, and their curves in one chart."""

from __future__ import annotations

import json
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from in_process import Finished, Inputs, train

from sftplay.cli import main
from sftplay.errors import ConfigError
from sftplay.launch.run_folder import RunFolder
from sftplay.report.page import Section
from sftplay.report.run_files import RunFiles
from sftplay.report.several import list_differences, several_sections, write_runs_page

EVIL = "b <script>alert(1)</script> & co"


@pytest.fixture(scope="module")
def run(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A finished run, measured before, after and on the way."""
    home = tmp_path_factory.mktemp("several")
    return train(home, inputs, train__eval_steps=2, eval__before=True, eval__after=True, eval__max_new_tokens=2)


@pytest.fixture
def folders(run: Finished, tmp_path: Path) -> list[RunFolder]:
    """Three runs: as it was, at another rate with half the losses at a price, and one that was stopped."""
    found = []
    for name in ("a", "b", "c,d"):
        left_out = shutil.ignore_patterns("*.safetensors", "*.pt", "checkpoints")
        shutil.copytree(run.folder.path, tmp_path / "outputs" / name, ignore=left_out)
        found.append(RunFolder(tmp_path / "outputs" / name))
    a, b, c = found
    for folder in (a, b):
        folder.update_status(state="done", step=4)
    attempt = {"from_step": 0, "to_step": 4, "cause": "done", "seconds": 1800.0, "gpus": 8, "price_per_hour": 2.5}
    b.update_status(attempts=[attempt])
    b.resolved.write_text(b.resolved.read_text().replace("learning_rate: 0.01", "learning_rate: 0.02"))
    lines = [json.loads(line) for line in b.metrics.read_text().splitlines()]
    b.metrics.write_text("".join(json.dumps({**line, "loss": line["loss"] / 2}) + "\n" for line in lines))
    b.write_json("eval/after.json", {**b.read_json("eval/after.json"), "loss": 0.125})
    c.update_status(state="stopped", step=2, attempts=[{"cause": "SIGTERM"}])
    return found


class Tables(HTMLParser):
    """The tables of a page as rows of cells, and the texts of its legends."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.legends: list[list[str]] = []
        self._open = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("th", "td"):
            self.tables[-1][-1].append("")
            self._open = "cell"
        elif tag == "ul" and ("class", "legend") in attrs:
            self.legends.append([])
        elif tag == "b" and self.legends:
            self.legends[-1].append("")
            self._open = "legend"

    def handle_endtag(self, tag: str) -> None:
        if tag in ("th", "td", "b"):
            self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open == "cell":
            self.tables[-1][-1][-1] += data
        elif self._open == "legend":
            self.legends[-1][-1] += data

    def column(self, table: int, title: str) -> list[str]:
        head, *rows = self.tables[table]
        return [row[head.index(title)] for row in rows]


def page_of(folders: list[RunFolder], tmp_path: Path, **more: object) -> str:
    return write_runs_page(folders, tmp_path / "page.html", title="three", **more).read_text(encoding="utf-8")  # type: ignore[arg-type]


def test_the_table_has_what_was_set_differently_and_what_came_of_every_run(folders: list[RunFolder], tmp_path: Path):
    page = Tables(page_of(folders, tmp_path))
    assert page.column(0, "Run") == ["a", "b", "c,d"]
    assert page.column(0, "train.learning_rate") == ["0.01", "0.02", "0.01"]
    assert page.tables[0][0][1:3] == ["train.learning_rate", "Training loss"]  # nothing else differs
    losses = [json.loads(folder.metrics.read_text().splitlines()[-1])["loss"] for folder in folders]
    assert losses[1] == losses[0] / 2
    assert page.column(0, "Training loss") == [f"{loss:.4g}" for loss in losses]
    assert page.column(0, "State") == ["done", "done", "stopped"]
    assert page.column(0, "Steps") == ["4 of 4"] * 3
    assert page.column(0, "Cost") == ["–", "10.00", "–"]  # 8 GPUs x half an hour x 2.5
    assert page.column(0, "Time")[1] == "30 min 00 s"


def test_tiles_name_the_best_run_and_sum_what_is_known(folders: list[RunFolder], tmp_path: Path):
    folders[1].write_json("eval/step-4.json", {"step": 4, "loss": 5.25})
    folders[2].write_json("eval/step-4.json", {"step": 4, "loss": 0.5})  # it is not done
    text = page_of(folders, tmp_path)
    tiles = text.partition('<dl class="keys"')[2].partition("</dl>")[0]
    assert "<dt>Lowest held-out loss</dt><dd>5.25<small>b</small>" in tiles
    assert "<dt>Runs</dt><dd>3<small>2 done</small>" in tiles
    assert "<dt>Cost in all</dt><dd>10.00<small>of 1 of 3 runs</small>" in tiles
    assert "<dt>Time in all</dt><dd>30 min" in tiles
    page = Tables(text)
    assert page.column(0, "Held-out loss")[1:] == ["5.25", "0.5"]
    peaks = [max(json.loads(row)["peak_rss_bytes"] for row in f.metrics.read_text().splitlines()) for f in folders]
    cells = [cell.split() for cell in page.column(0, "Peak memory")]
    bytes_shown = [float(number) * {"MiB": 2**20, "GiB": 2**30}[unit] for number, unit in cells]
    assert bytes_shown == pytest.approx(peaks, rel=0.005)
    assert "Sampled reward" not in page.tables[0][0]  # no run has one


@pytest.mark.parametrize("differs", ["rows", "task"])
def test_losses_that_do_not_compare_have_no_lowest_one_and_no_unit_that_one_of_them_lacks(
    folders: list[RunFolder], tmp_path: Path, differs: str
):
    page = page_of(folders, tmp_path)
    assert ("Lowest held-out loss" in page, "nats a token" in page) == (True, True)
    if differs == "rows":
        answers = folders[1].eval / "after.jsonl"
        answers.write_text(answers.read_text().partition("\n")[0] + "\n")
    else:
        config = folders[1].resolved.read_text()
        folders[1].resolved.write_text(config.replace("task_mode: sft", "task_mode: dpo"))
    page = page_of(folders, tmp_path)
    assert ("Lowest held-out loss" in page, "nats a token" in page) == (False, differs == "rows")


def test_of_many_settings_the_first_stand_in_the_table_and_all_below_a_line(folders: list[RunFolder], tmp_path: Path):
    def differ(n: int) -> str:
        lines = "".join(f"  key{i}: {{}}\n" for i in range(n))
        for number, folder in enumerate(folders):
            folder.resolved.write_text("x:\n" + lines.replace("{}", str(number)))
        return page_of(folders, tmp_path)

    assert "settings that differ" not in differ(8)
    page = differ(9)
    assert "<summary>All 9 settings that differ</summary>" in page
    read = Tables(page)
    assert [title for title in read.tables[0][0] if title.startswith("x.")] == [f"x.key{i}" for i in range(8)]
    assert read.tables[1][0] == ["Key", "a", "b", "c,d"]
    assert read.tables[1][-1] == ["x.key8", "0", "1", "2"]


def test_figures_stand_side_by_side_before_and_after(folders: list[RunFolder], tmp_path: Path):
    page = Tables(page_of(folders, tmp_path))
    before, after = (folders[0].read_json(f"eval/{name}.json")["loss"] for name in ("before", "after"))
    assert page.column(1, "Loss") == [f"{before:.4g} → {end:.4g}" for end in (after, 0.125, after)]
    shares = page.column(1, "Exact match")
    assert len(shares) == 3
    assert all("→" in cell for cell in shares)


def test_each_chart_has_a_curve_of_every_run_with_its_name_in_the_legend(folders: list[RunFolder], tmp_path: Path):
    text = page_of(folders, tmp_path)
    page = Tables(text)
    titles = [
        line.partition("<figcaption>")[2].partition("<")[0] for line in text.splitlines() if "<figcaption>" in line
    ]
    assert titles[:2] == ["Training loss", "Held-out loss"]
    assert page.legends == [["a", "b", "c,d"]] * len(titles)
    paths = [line for line in text.splitlines() if 'class="line' in line]
    assert [line.partition('class="line ')[2][0] for line in paths[:3]] == ["a", "b", "c"]  # three colours
    assert len({line.partition(' d="')[2] for line in paths[:3]}) == 2  # b's losses are others


def test_a_run_keeps_its_colour_in_charts_that_others_have_no_curve_in(folders: list[RunFolder], tmp_path: Path):
    for path in folders[0].eval.glob("*.json"):
        path.unlink()
    text = page_of(folders, tmp_path)
    held_out = text.partition("<figcaption>Held-out loss")[2].partition("</figure>")[0]
    assert '<li class="b"><b>b</b>' in held_out
    assert '<li class="c"><b>c,d</b>' in held_out
    assert '<li class="a">' not in held_out


def test_names_are_shown_as_text(folders: list[RunFolder], tmp_path: Path):
    folders[1].update_status(error={"what": EVIL})
    (tmp_path / "outputs" / "b").rename(tmp_path / "outputs" / EVIL.replace("/", "|"))
    folders[1] = RunFolder(tmp_path / "outputs" / EVIL.replace("/", "|"))
    path = write_runs_page(folders, tmp_path / "page.html", title=EVIL)
    text = path.read_text()
    assert "<script>alert" not in text
    assert text.count("&lt;script&gt;alert(1)&lt;") >= 4  # title, heading, table, legends
    assert Tables(text).column(0, "Run")[1] == folders[1].name


def test_what_does_not_compare_and_what_is_not_final_is_said_first(folders: list[RunFolder], tmp_path: Path):
    manifest = folders[1].read_json("manifest.json")
    manifest["machine"]["gpus"] = [{"name": "NVIDIA H100"}]
    folders[1].write_json("manifest.json", manifest)
    folders[1].write_json("data_report.json", {})
    (folders[1].eval / "after.jsonl").write_text("")
    text = page_of(folders, tmp_path)
    assert "c,d: stopped, so figures are not final." in text
    assert "b: next to a, it is not known whether both were measured on the same held-out rows" in text
    assert "The machines differ or are not known" in text


def test_files_that_are_broken_leave_a_row_and_a_warning(folders: list[RunFolder], tmp_path: Path):
    for name in ("status.json", "config.resolved.yaml", "metrics.jsonl", "eval/after.json"):
        (folders[2].path / name).write_bytes(b'{"state": \xff')
    page = page_of(folders, tmp_path)
    assert Tables(page).column(0, "State") == ["done", "done", "unknown"]
    assert "c,d: status.json cannot be read" in page


def test_a_caller_adds_sections_above_and_the_sections_stand_alone(folders: list[RunFolder], tmp_path: Path):
    text = page_of(folders, tmp_path, extra_sections=[Section("trials", "Trials", [("text", "8 trials")])])
    assert text.index('id="trials"') < text.index('id="warnings"') < text.index('id="runs"') < text.index('id="curves"')
    runs = [RunFiles(folder) for folder in folders]
    assert [section.anchor for section in several_sections(runs)] == ["warnings", "runs", "figures", "curves"]
    assert list_differences(runs) == ["train.learning_rate"]


def test_of_many_runs_all_have_a_row_and_the_first_sixteen_a_curve(folders: list[RunFolder], tmp_path: Path):
    page = page_of([*folders] * 6, tmp_path)
    read = Tables(page)
    assert len(read.column(0, "Run")) == 18
    assert len(read.legends[0]) == 16
    assert "The curves of the first 16 of 18 runs are drawn." in page
    assert page.count('<li class="a dashed">') == len(read.legends)  # the ninth run, dashed in the first one's colour


def test_report_of_several_names_writes_one_page_over_its_own_and_over_nothing_else(
    folders: list[RunFolder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert main(["report", "--run", 'a,b,"c,d"', "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
    assert answer == {"report": "outputs/report-a+b+c,d.html", "runs": ["outputs/a", "outputs/b", "outputs/c,d"]}
    assert Tables(Path(answer["report"]).read_text()).column(0, "Run") == ["a", "b", "c,d"]
    assert "<h1>a, b, c,d</h1>" in Path(answer["report"]).read_text()
    assert main(["report", "--run", "c,d"]) == 0  # one run with a comma in its name
    assert capsys.readouterr().out.strip() == "outputs/c,d/report.html"
    assert main(["report", "--run", "a,b", "--out", "outputs/c,d/report.html"]) == 2
    assert "is no page of several runs" in capsys.readouterr().err
    Path("notes.html").write_text("mine")
    with pytest.raises(ConfigError, match="is no page of several runs"):
        write_runs_page(folders, Path("notes.html"), title="x")
    assert Path("notes.html").read_text() == "mine"
    assert main(["report", "--run", "a,bb"]) == 2
    assert "no run 'bb'" in (said := capsys.readouterr().err)
    assert "did you mean 'b'?" in said
    assert main(["report", "--run", "a, a"]) == 2
    assert "names 'a' twice" in capsys.readouterr().err
    assert main(["report", "--run", "a", "--out", "x.html"]) == 2
    assert main(["report"]) == 2
    assert "no run is named" in capsys.readouterr().err


def test_a_list_of_runs_may_be_longer_than_a_name_can_be(
    folders: list[RunFolder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    names = [f"trial-{n:03}-of-a-sweep-with-a-long-name" for n in range(9)]
    for name in names:
        (tmp_path / "outputs" / name).mkdir(parents=True)
        (tmp_path / "outputs" / name / "config.resolved.yaml").write_text("seed: 1\n")
    monkeypatch.chdir(tmp_path)
    assert len(words := ",".join(names)) > 255
    assert main(["report", "--run", words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["runs"] == [f"outputs/{name}" for name in names]
    assert Path(answer["report"]).is_file()
