"""Each notebook runs from its first cell to its last, on tiny runs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jupytext
import pytest
from made_runs import make_run, world_events
from nbclient import NotebookClient
from nbformat import NotebookNode
from patience import HANG_SECONDS

FOLDER = Path(__file__).parents[2] / "notebooks"
SCRIPTS = sorted(FOLDER.glob("*.py"))
NAMES = [path.stem for path in SCRIPTS]


def execute(name: str, folder: Path, parameters: dict[str, Any]) -> list[str]:
    """Run all cells in a folder; returns what they show as HTML."""
    notebook = jupytext.read(FOLDER / f"{name}.py")
    (cell,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
    cell.source += "".join(f"\n{key} = {value!r}" for key, value in parameters.items())
    resources = {"metadata": {"path": folder}}
    NotebookClient(notebook, timeout=HANG_SECONDS, resources=resources).execute()
    return list(shown(notebook))


def shown(notebook: NotebookNode) -> Iterator[str]:
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            assert output.output_type != "stream", output.text
            yield output.data.get("text/html", output.data["text/plain"])


def test_there_are_four() -> None:
    assert [name[:2] for name in NAMES] == ["01", "02", "03", "04"]


def test_paper_tables(paper_runs: Path, tmp_path: Path) -> None:
    page = "".join(execute("01_paper_tables", tmp_path, {"FOLDERS": [str(paper_runs)]}))
    assert "<td>95 %, L = 1</td>" in page
    assert "0.4538, 78.78 %" in page


def test_thresholds(paper_runs: Path, tmp_path: Path) -> None:
    parameters = {
        "GRADIENTS": [str(paper_runs / "dp_0")],
        "ACTIVATIONS": [str(paper_runs / name) for name in ("mp_0", "observed_0")],
    }
    page = "".join(execute("02_thresholds_and_sparsity", tmp_path, parameters))
    assert page.count("<img") >= 4
    assert "<td>75 %, measured only</td>" in page


def test_network_and_cpu(tmp_path: Path) -> None:
    for name in ("baseline", "dct_hybrid"):
        make_run(tmp_path / name, [f"+experiment={name}"], world_events())
    page = "".join(execute("03_network_and_cpu", tmp_path, {"FOLDERS": [str(tmp_path)]}))
    assert "baseline / dct_hybrid" in page
    assert page.count("<img") >= 2


def test_compare_runs(tmp_path: Path) -> None:
    for name in ("baseline", "dct_hybrid"):
        make_run(tmp_path / name, [f"+experiment={name}"], world_events())
    page = "".join(execute("04_compare_runs", tmp_path, {"FOLDERS": [str(tmp_path)]}))
    assert "gradient.density" in page
    for axis in ("training steps", "seconds of training", "bytes sent in training"):
        assert f"Loss over {axis}" in page


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_with_runs_of_its_own(name: str, tmp_path: Path) -> None:
    page = "".join(execute(name, tmp_path, {}))
    assert "<td" in page
    assert "Loss over" not in page or "Loss over bytes sent in training" in page
    assert list((tmp_path / "runs" / "notebooks").iterdir())
