"""The report of training runs: curves worked out by hand, figures equal to the lines, a page that fetches nothing."""

import json
import re
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import MakeRecipe
from draftsmith.report.curves import Curve, read_curves
from draftsmith.report.figures import figures
from draftsmith.report.page import training_page
from draftsmith.report.runs import open_runs
from test_page import NAMESPACES, parse

Cli = Callable[..., tuple[int, str, str]]
HOSTILE = "<script>alert(1)</script>&"


def metric(step: int, loss: float, **changes: Any) -> dict[str, Any]:
    """Return a line as the loop writes it: 100 tokens in one second, after waiting for a quarter of one."""
    line = {
        "step": step, "epoch": 0, "loss": loss, "step_loss": [loss / 2, loss], "agreement": [0.5, 0.25],
        "lr": 1e-3 / step, "grad_norm": 10.0 * step, "tokens": 100, "targets": 40, "tokens_per_second": 100.0,
        "wait_seconds": 0.25,
    }  # fmt: skip
    return line | changes


def measurement(step: int, length: float) -> dict[str, Any]:
    return {"step": step, "acceptance_length": length, "conditional_acceptance": [0.5, 0.25]}


def write_run(
    folder: Path, lines: list[dict[str, Any]], measured: list[dict[str, Any]] | None = None, **recipe: Any
) -> Path:
    """Write the files of an unfinished run of 10 planned steps."""
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir(parents=True)
    for name, content in (("metrics.jsonl", lines), ("measurements.jsonl", measured or [])):
        (checkpoint / name).write_text("".join(json.dumps(line) + "\n" for line in content))
    train = {"epochs": 3, "out_of_vocabulary": "keep", "objective": "kl", **recipe}
    planned = {"planned_steps": 10, "samples_without_target": 2, "vocabulary_coverage": 0.96875}
    (checkpoint / "identity.json").write_text(json.dumps({"made_from": {"train": train}, "planned": planned}))
    return folder


def finish(folder: Path, **counts: Any) -> None:
    manifest = {"made_from": {"train": {}}, "counts": {"planned_steps": 10, **counts}, "files": {}}
    (folder / "checkpoint" / "manifest.json").write_text(json.dumps(manifest))


def test_seven_lines_in_three_points(tmp_path: Path) -> None:
    """The example of report/curves.py."""
    folder = write_run(tmp_path, [metric(step, loss) for step, loss in enumerate([9.0, 6, 6, 5, 3, 4, 2], 1)])
    curves = read_curves(folder / "checkpoint" / "metrics.jsonl", points=3)
    assert curves is not None
    loss = curves.named["loss"]
    assert curves.width == 3
    assert curves.step.tolist() == [3, 6, 7]
    assert curves.tokens.tolist() == [300, 600, 700]
    assert (loss.total / loss.count).tolist() == [7, 4, 2]
    assert list(zip(loss.least, loss.largest, strict=True)) == [(6, 9), (3, 5), (2, 2)]
    assert [curve.total.tolist() for curve in curves.per_unroll_step("step_loss")] == [[10.5, 6, 1], [21, 12, 2]]
    assert curves.named["wait_share"].total.tolist() == pytest.approx([0.6, 0.6, 0.2])
    assert loss.running_mean().tolist() == [7, 4, 2]  # of so few points each is its own mean
    assert loss.lately() == 2


def test_the_running_mean_of_a_hundred_points() -> None:
    """Two points to either side, one or none near the ends; a point of more steps weighs more."""
    squares = np.arange(100.0) ** 2
    one = np.ones(100)
    mean = Curve(one, squares, squares, squares).running_mean()
    assert mean[[0, 1, 50, 98, 99]].tolist() == [0, 5 / 3, 2502, (97**2 + 98**2 + 99**2) / 3, 99**2]
    count = one.copy()
    count[50] = 5
    total = squares * count
    weighted = Curve(count, total, squares, squares).running_mean()
    assert weighted[50] == (48**2 + 49**2 + 5 * 50**2 + 51**2 + 52**2) / 9
    assert Curve(count, total, squares, squares).lately() == sum(i**2 for i in range(95, 100)) / 5


def test_curves_equal_a_plain_reading_of_all_lines(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    losses = (random.random(2345) * 5).tolist()
    folder = write_run(tmp_path, [metric(step, loss) for step, loss in enumerate(losses, 1)])
    curves = read_curves(folder / "checkpoint" / "metrics.jsonl", points=100)
    assert curves is not None
    parts = [losses[start : start + 24] for start in range(0, 2345, 24)]
    reach = len(parts) // 50
    mean = []
    for place in range(len(parts)):
        h = min(reach, place, len(parts) - 1 - place)
        around = [loss for part in parts[place - h : place + h + 1] for loss in part]
        mean.append(sum(around) / len(around))
    loss = curves.named["loss"]
    assert loss.running_mean() == pytest.approx(mean)
    assert loss.least.tolist() == list(map(min, parts))
    assert loss.largest.tolist() == list(map(max, parts))
    assert curves.step.tolist() == [*range(24, 2345, 24), 2345]


def test_what_is_not_finite_or_not_there_is_left_out(tmp_path: Path) -> None:
    lines = [metric(1, 4.0, grad_norm=float("inf")), metric(2, 2.0, grad_norm=3.0), metric(3, 6.0)]
    del lines[2]["grad_norm"]
    folder = write_run(tmp_path, lines)
    curves = read_curves(folder / "checkpoint" / "metrics.jsonl", points=2)
    assert curves is not None
    norm = curves.named["grad_norm"]
    assert norm.count.tolist() == [1, 0]
    assert (norm.total[0], norm.least[0], norm.largest[0]) == (3, 3, 3)
    assert np.isnan([norm.least[1], norm.largest[1], norm.running_mean()[1]]).all()


def test_only_one_point_of_lines_is_in_memory(tmp_path: Path) -> None:
    """8,000 lines, parsed and kept, would take over 10 MB; a point of 80 takes little."""
    folder = write_run(tmp_path, [metric(step, 1.0) for step in range(1, 8001)])
    tracemalloc.start()
    read_curves(folder / "checkpoint" / "metrics.jsonl", points=100)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2e6


def test_the_summary_is_what_the_lines_say(tmp_path: Path, run_cli: Cli) -> None:
    """Forty lines: the last two are lately. The second measurement is the best, the first of equals."""
    lines = [metric(step, 100.0 - step, epoch=(step - 1) // 20) for step in range(1, 41)]
    folder = write_run(tmp_path / "run", lines, [measurement(10, 1.5), measurement(20, 1.75), measurement(40, 1.75)])
    (folder / "checkpoint" / "step-000020").mkdir()
    (folder / "checkpoint" / "step-000040").mkdir()
    code, out, err = run_cli("report", folder, "--json")
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert result["page"] == str(folder / "report.html")
    (run,) = result["runs"]
    wanted = {
        "run": str(folder), "name": "run", "finished": False, "steps": 40, "planned_steps": 10, "epochs": 2,
        "tokens_seen": 4000, "targets_seen": 1600, "first": lines[0], "last": lines[-1], "compute_seconds": 40.0,
        "wait_seconds": 10.0, "tokens_per_second": 100.0, "wait_share": 0.2, "measurements": 3,
        "best": measurement(20, 1.75), "draft": "step-000020/draft", "evaluation": None,
    }  # fmt: skip
    assert {key: run[key] for key in wanted} == wanted
    assert run["lately"]["loss"] == 60.5
    assert run["lately"]["step_loss"] == [30.25, 60.5]
    assert run["lately"]["grad_norm"] == 395
    assert run["dropped"] == {
        "rows": {}, "truncated": None, "samples_without_target": 2, "share_outside_draft_vocabulary": 0.03125,
        "out_of_vocabulary": "keep",
    }  # fmt: skip
    page = (folder / "report.html").read_text()
    for shown in ("unfinished", "2 of 3", "4,000", "60.500", "1.750 after step 20", "0.500, 0.250", "20.0%", "3.12%"):
        assert shown in page


def test_a_finished_run_with_its_samples_and_evaluation(tmp_path: Path, run_cli: Cli) -> None:
    folder = write_run(tmp_path / "run", [metric(1, 2.0)])
    finish(folder, draft="step-000001/draft", samples_without_target=0, vocabulary_coverage=1.0)
    for name in ("samples", "evaluation"):
        (folder / name).mkdir()
    prepared = {"counts": {"dropped": {f"no answer {HOSTILE}": 7}, "truncated": 3}}
    (folder / "samples" / "manifest.json").write_text(json.dumps(prepared))
    offline = {"conditional_acceptance": [0.5, 0.4], "acceptance_length": {"1": 1.5, "2": 1.7}}
    plain = {"draft_length": 0, "tokens_per_second": 20.0, "speed_up": 1.0, "identical_answers": 4}
    drafted = {"draft_length": 2, "tokens_per_second": 30.0, "speed_up": 1.5, "identical_answers": 3}
    drafted["acceptance_length"] = 1.625
    real = {"prompts": 4, "methods": [plain, drafted]}
    (folder / "evaluation" / "evaluation.json").write_text(json.dumps({"offline": offline, "real": real}))
    made_from = {"made_from": {"inputs": {"checkpoint": "another"}}}
    (folder / "evaluation" / "manifest.json").write_text(json.dumps(made_from))
    code, out, _ = run_cli("report", folder, "--json", "--out", tmp_path / "page.html")
    assert code == 0
    (run,) = json.loads(out)["runs"]
    assert run["finished"]
    assert run["draft"] == "step-000001/draft"
    assert run["evaluation"] == {"of_this_checkpoint": False, "offline": offline, "real": real}
    page = (tmp_path / "page.html").read_text()
    assert parse(page).fetched == []
    assert HOSTILE not in page
    assert "7 rows: no answer &lt;script&gt;" in page
    assert "3 samples truncated" in page
    assert "ended by patience" in page
    assert "<td>draft length 2</td><td>1.625</td><td>30.0</td><td>1.50</td><td>3/4</td>" in page
    assert "measured another checkpoint" in page


def test_the_page_of_several_runs_fetches_nothing_and_says_what_differs(tmp_path: Path, run_cli: Cli) -> None:
    measured = [measurement(1, 1.5), measurement(2, 1.6)]
    runs = [
        write_run(tmp_path / name / "run", [metric(1, 30.0), metric(2, 20.0)], measured, lr=lr)
        for name, lr in ((HOSTILE.replace("/", ""), 1e-3), ("slow", 1e-4))
    ]
    code, out, _ = run_cli("report", *runs, "--out", tmp_path / "both.html")
    assert code == 0
    assert "unfinished, 2 steps of 10, loss 20.000 lately, best acceptance length 1.600 after step 2" in out
    page = (tmp_path / "both.html").read_text()
    assert parse(page).fetched == []
    assert set(re.findall(r"\w+://[^\s\"')<]*", page)) <= NAMESPACES
    assert "<script>" not in page
    assert "@import" not in page
    differing = page[page.index("What differs") :]
    assert differing.index("<td>lr</td><td>0.001</td><td>0.0001</td>") < differing.index("Recipe: train")
    found = [figure for _, group in figures(open_runs(runs)) for figure in group]
    assert all([name for _, name in figure.legend] == ["<script>alert(1)<script>&", "slow"] for figure in found)
    titles = [figure.title for figure in found]
    assert len(set(titles)) == len(titles)
    for title in ("Loss", "Loss, over tokens seen", "Loss of unroll step 1", "Agreement of unroll step 0",
                  "Acceptance length, over tokens seen", "Conditional acceptance of draft position 2",
                  "Learning rate", "Gradient norm", "Tokens per second, waiting left out",
                  "Share of the time waiting for data"):  # fmt: skip
        assert title in titles


def test_one_run_has_a_line_per_unroll_step_and_the_same_bytes_every_time(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [metric(1, 30.0), metric(2, 20.0)], [measurement(2, 1.5)])
    found = {figure.title: figure for _, group in figures(open_runs([folder])) for figure in group}
    assert [name for _, name in found["Loss of each unroll step"].legend] == ["step 0", "step 1"]
    assert [name for _, name in found["Agreement of each unroll step"].legend] == ["step 0", "step 1"]
    assert found["Loss"].legend == []
    assert "tokens seen" in found["Loss"].svg
    assert training_page(open_runs([folder])) == training_page(open_runs([folder]))


@pytest.mark.parametrize(("last", "is_log"), [(29.0, False), (2.0, True)])
def test_a_wide_range_has_a_logarithmic_axis(tmp_path: Path, last: float, is_log: bool) -> None:
    """From 2 to 30 a logarithmic axis has labels at 2, 5, 10, 20; a plain one would have 15 too, or begin at 29."""
    folder = write_run(tmp_path, [metric(1, 30.0), metric(2, last)])
    (loss, *_), *_ = (group for _, group in figures(open_runs([folder])))
    labels = re.findall(r"<text[^>]*>([^<]*)</text>", loss.svg)
    assert ("5" in labels and "15" not in labels) is is_log


def test_a_run_without_measurements_is_a_page_and_a_cut_line_does_not_count(tmp_path: Path, run_cli: Cli) -> None:
    """Named by its checkpoint folder, and copied away from its run."""
    folder = write_run(tmp_path / "run", [metric(1, 5.0), metric(2, 4.0)]) / "checkpoint"
    (folder / "measurements.jsonl").unlink()
    (folder / "identity.json").unlink()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": 3.')
    copied = folder.rename(tmp_path / "copied")
    code, out, _ = run_cli("report", copied, "--json")
    assert code == 0
    (run,) = json.loads(out)["runs"]
    assert (run["steps"], run["last"]["loss"], run["planned_steps"], run["best"]) == (2, 4.0, None, None)
    assert (run["recipe"], run["counts"]) == ({}, {})
    page = (copied / "report.html").read_text()
    parse(page)
    assert "not measured" in page
    assert "Held-out acceptance" not in page


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no training run: neither metrics.jsonl nor checkpoint/metrics.jsonl is in it. Name the run_dir"),
        ("", "metrics.jsonl: no finished step in it yet. Run this again after the first one."),
        ('{"step": 1', "metrics.jsonl: no finished step in it yet"),
        ('{"step": 1, "loss": 2}\n{"step": 2,\n', "metrics.jsonl, line 2: not valid JSON"),
        ('{"step": 1}\n[3]\n', "metrics.jsonl, line 2: wanted an object with a whole number 'step', found '[3]"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path: Path, run_cli: Cli, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    code, out, err = run_cli("report", tmp_path)
    assert (code, out) == (2, "")
    assert message in err
    assert not (tmp_path / "report.html").exists()


def test_wrong_folders_are_refused(tmp_path: Path, run_cli: Cli) -> None:
    run = write_run(tmp_path / "run", [metric(1, 5.0)])
    for arguments, message in (
        ((tmp_path / "none",), "not there; wanted the folder of a run"),
        ((run / "checkpoint" / "metrics.jsonl",), "a file; wanted the folder of a run"),
        ((run, run / "checkpoint"), "named twice"),
        ([run] * 9, "9 runs: at most 8 in one page"),
        ((run, "--out", tmp_path / "none" / "page.html"), "cannot be written: No such file or directory"),
    ):
        code, _, err = run_cli("report", *arguments)
        assert code == 2
        assert message in err


def test_runs_are_named_by_what_differs_in_their_paths(tmp_path: Path) -> None:
    def names(*paths: str) -> list[str]:
        for path in paths:
            if not (tmp_path / path).exists():
                write_run(tmp_path / path, [metric(1, 5.0)])
        return [run.name for run in open_runs([tmp_path / path for path in paths])]

    assert names("a/run", "b/run") == ["a", "b"]
    assert names("a/run", "a/x/run", "c") == ["a/run", "a/x/run", "c"]
    assert names("a/run/checkpoint", "b/run/checkpoint") == ["a", "b"]
    assert names("a/run/checkpoint") == ["run"]


def test_a_real_run_without_torch(make_recipe: MakeRecipe, run_cli: Cli, tmp_path: Path) -> None:
    """Its planned steps are known before the first one is done."""
    recipe = make_recipe()
    for stage in ("prepare", "extract", "validate", "train"):
        assert run_cli(stage, recipe)[0] == 0
    checkpoint = tmp_path / "run" / "checkpoint"
    counts = json.loads((checkpoint / "manifest.json").read_text())["counts"]
    planned = json.loads((checkpoint / "identity.json").read_text())["planned"]
    assert planned["planned_steps"] == counts["steps"]
    assert planned.items() <= counts.items()
    code = (
        "import sys; from draftsmith.cli.main import main\n"
        "try: main(['report', sys.argv[1], '--json'])\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules, 'transformers' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(checkpoint)], capture_output=True, text=True, check=True)
    assert done.stderr == "False False\n"
    (run,) = json.loads(done.stdout)["runs"]
    assert run["finished"]
    assert (run["steps"], run["best"], run["draft"]) == (counts["steps"], counts["best"], counts["draft"])
    assert run["last"]["loss"] == counts["final_loss"]
    assert parse((checkpoint / "report.html").read_text()).fetched == []
