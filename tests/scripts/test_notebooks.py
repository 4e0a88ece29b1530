"""Notebooks, from the first cell to the last, and studies, on tiny runs."""

import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jupytext
import pytest
from made_runs import make_run, world_events
from nbclient import NotebookClient
from nbformat import NotebookNode
from patience import HANG_SECONDS

from dlrm_hybrid.cli.main import run

FOLDER = Path(__file__).parents[2] / "notebooks"
SCRIPTS = sorted(FOLDER.glob("*.py"))
NAMES = [path.stem for path in SCRIPTS]


@pytest.fixture
def execute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Run all cells in this process, with these parameters: what they show as HTML."""
    shown = list[Any]()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("IPython.display.display", shown.append)

    def executed(name: str, **parameters: Any) -> str:
        names: dict[str, Any] = {}
        for cell in jupytext.read(FOLDER / f"{name}.py").cells:
            *body, last = ast.parse(cell.source if cell.cell_type == "code" else "None").body
            is_value = isinstance(last, ast.Expr)
            exec(compile(ast.Module(body if is_value else [*body, last], []), name, "exec"), names)
            if is_value:
                shown.append(eval(compile(ast.Expression(last.value), name, "eval"), names))
            if "parameters" in cell.metadata.get("tags", ()):
                names |= parameters
        assert capsys.readouterr().out == ""
        some = [one for one in shown if one is not None]
        return "".join(
            one._repr_html_() if hasattr(one, "_repr_html_") else repr(one) for one in some
        )

    return executed


def shown_by(notebook: NotebookNode) -> Iterator[str]:
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            assert output.output_type != "stream", output.text
            yield output.data.get("text/html", output.data["text/plain"])


@pytest.fixture(scope="module")
def paper_runs(small_rows: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs NAME_SEED: a baseline of each seed, DCT-DP of each seed, DCT-MP measured and applied."""
    runs = tmp_path_factory.mktemp("runs")
    world = ("parallel.world=in_process", "parallel.trainers=1", "train.steps=24")
    exact = ("gradient.threshold=exact", "gradient.lifespan=1", "gradient.renewal=fixed")

    def train(name: str, *overrides: str) -> None:
        argv = ["dlrm_hybrid", "train", *small_rows, *world, f"hydra.run.dir={runs / name}"]
        assert run([*argv, "train.evaluate_every=8", "telemetry.every=2", *overrides]) == 0

    for seed in (0, 1):
        train(f"base_{seed}", "+experiment=baseline", f"train.seed={seed}")
        dp = ("+experiment=dct_dp", "parallel.cuts=[]", "gradient.density=0.05", *exact)
        train(f"dp_{seed}", f"train.seed={seed}", *dp)
    train("mp_0", "+experiment=dct_mp", "activation.sparsity=[0.5,0.75]")
    train("top_0", "+experiment=dct_mp", "parallel.cuts=[top.1]", "activation.sparsity=0.75")
    train(
        "zero_0",
        "+experiment=paper_table3",
        "activation.sparsity=0.0",
        "optimizer.schedule=constant",
    )
    train("observed_0", "+experiment=baseline", "activation.observe=0.75")
    return runs


@pytest.mark.parametrize(
    ("study", "options", "runs"),
    [
        ("paper_tables", ["--output", "page.md"], ["base_0", "base_1", "dp_0", "dp_1", "mp_0"]),
        ("estimates", ["--output", "page.png"], ["dp_0"]),
        ("buildup", ["--output", "page.png"], ["dp_0"]),
        ("gap", ["--output", "page.png", "--baseline", "RUNS/base_0", "--runs"], ["dp_0", "mp_0"]),
        ("thresholds", ["--output", "page.png", "--names", "activation.1", "--runs"], ["mp_0"]),
    ],
)
def test_studies_read_runs(
    study: str,
    options: list[str],
    runs: list[str],
    paper_runs: Path,
    script: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [one.replace("RUNS", str(paper_runs)) for one in options]
    assert script(f"studies/{study}.py", *given, *(paper_runs / run for run in runs)) == 0
    page = tmp_path / options[1]
    assert page.read_bytes().startswith(b"\x89PNG" if page.suffix == ".png" else b"#")


def test_there_are_four() -> None:
    assert [name[:2] for name in NAMES] == ["01", "02", "03", "04"]


def test_paper_tables(paper_runs: Path, execute: Callable[..., str]) -> None:
    page = execute("01_paper_tables", FOLDERS=[str(paper_runs)])
    assert "<td>95 %, L = 1</td>" in page
    assert "0.4538, 78.78 %" in page


def test_thresholds(paper_runs: Path, execute: Callable[..., str]) -> None:
    page = execute(
        "02_thresholds_and_sparsity",
        GRADIENTS=[str(paper_runs / "dp_0")],
        ACTIVATIONS=[str(paper_runs / name) for name in ("mp_0", "observed_0")],
    )
    assert page.count("<img") >= 4
    assert "<td>75 %, measured only</td>" in page


def test_network_and_cpu(tmp_path: Path, execute: Callable[..., str]) -> None:
    for name in ("baseline", "dct_hybrid"):
        make_run(tmp_path / name, [f"+experiment={name}"], world_events())
    page = execute("03_network_and_cpu", FOLDERS=[str(tmp_path)])
    assert "baseline / dct_hybrid" in page
    assert page.count("<img") >= 2


def test_compare_runs(tmp_path: Path, execute: Callable[..., str]) -> None:
    for name in ("baseline", "dct_hybrid"):
        make_run(tmp_path / name, [f"+experiment={name}"], world_events())
    page = execute("04_compare_runs", FOLDERS=[str(tmp_path)])
    assert "gradient.density" in page
    for axis in ("training steps", "seconds of training", "bytes sent in training"):
        assert f"Loss over {axis}" in page


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_with_runs_of_its_own(name: str, tmp_path: Path) -> None:
    notebook = jupytext.read(FOLDER / f"{name}.py")
    resources = {"metadata": {"path": tmp_path}}
    NotebookClient(notebook, timeout=HANG_SECONDS, resources=resources).execute()
    page = "".join(shown_by(notebook))
    assert "<td" in page
    assert "Loss over" not in page or "Loss over bytes sent in training" in page
    assert list((tmp_path / "runs" / "notebooks").iterdir())
