"""Exported models score as their checkpoints; nothing half written is left."""

import json
import os
import signal
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from dlrm_net import DlrmNet, torchrec_rows, torchrec_tables
from forked import exit_code_of
from hypothesis import given
from hypothesis import strategies as st
from torchrec.models.dlrm import DLRM

from dlrm_hybrid.checkpoint.folder import find, read_facts
from dlrm_hybrid.cli.main import run
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.data.loader import Batch, sequential_batches
from dlrm_hybrid.data.shards import Shards, open_shards
from dlrm_hybrid.export.formats import ModelFile
from dlrm_hybrid.export.names import names_of, shapes_of, to_ours, to_theirs
from dlrm_hybrid.export.plain import LEVELS, quantised
from dlrm_hybrid.export.writing import LOGIT_TOLERANCE, SCORE_TOLERANCE, compare
from dlrm_hybrid.model.layers.products import Precision
from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.saved.model import SavedModel
from dlrm_hybrid.types import ConfigError

TOLERANCE = 1e-5
ROWS = 1000


def export(checkpoint: Path, output: Path, *overrides: str) -> int:
    given = (f"export.checkpoint={checkpoint}", f"export.output={output}", *overrides)
    return run(["dlrm_hybrid", "export", *given])


def prepared(checkpoint: Path) -> Shards:
    config = validate(read_facts(find(checkpoint))["config"])
    assert config.data.prepared is not None
    return open_shards(Path(config.data.prepared), None)


def saved(checkpoint: Path, *, rounds: bool = False) -> SavedModel:
    config = validate(read_facts(find(checkpoint))["config"])
    rows = prepared(checkpoint).manifest
    return SavedModel.load(config, find(checkpoint), rows, Precision.FLOAT32, rounds=rounds)


def some_rows(checkpoint: Path, rows: range) -> Batch:
    (batch,) = sequential_batches(prepared(checkpoint), rows, len(rows))
    return batch


# Making a graph takes seconds; one of ONNX with masks is made below, one of 8 bits in
# test_multi_hot.py.
QUICK = {("pt2", False, "single")}


@pytest.mark.parametrize(
    ("format", "int8", "layout"),
    [
        pytest.param(
            *case, marks=() if {case, case[0]} & {*QUICK, "safetensors"} else pytest.mark.slow
        )
        for case in product(("pt2", "onnx", "safetensors"), (False, True), ("single", "served"))
    ],
)
def test_what_is_written_scores_as_the_checkpoint(
    format: Any,
    int8: bool,
    layout: str,
    runs: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "exported"
    told = (f"export.format={format}", f"export.int8={str(int8).lower()}", "export.check_rows=300")
    assert export(runs[layout], output, *told) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert f"wrote {output} (model.{format}: " in shown.out
    assert "300 test rows" in shown.out and ", AUC by " in shown.out
    description = json.loads((output / "model.json").read_text())
    assert description["check"]["before"]["rows"] == 300

    model = saved(runs[layout])
    assert description["model"]["kept_after"] == {name: one.k for name, one in model.masks.items()}
    is_of_standard_operators(format, output, len(model.masks))
    file = ModelFile(format=format, naming="ours", spec=model.spec, int8=int8, masks=model.masks)
    assert list(model.masks) == (["bottom.2", "top.2"] if layout == "served" else [])
    before = file.expected(model.tensors) if int8 else model.score
    after = file.scorer(output)
    for rows in (range(1), range(2), range(7), range(4000, 4000 + ROWS)):  # batches of any size
        batch = some_rows(runs[layout], rows)
        expected, found = (one(batch) for one in (before, after))
        for wanted, got in zip(expected, found, strict=True):
            assert got.dtype == np.float32 and got.shape == (len(rows),)
            np.testing.assert_allclose(got, wanted, rtol=0, atol=TOLERANCE)
    assert before(batch)[0].std() > 0.01  # there is something to agree on
    if model.masks:
        through: Any = torch.nn.Identity()
        unmasked = replace(model, masks=dict.fromkeys(model.masks, through)).logits(batch)
        assert np.abs(unmasked - model.logits(batch)).max() > 100 * TOLERANCE


def is_of_standard_operators(format: str, folder: Path, masks: int) -> None:
    """And has no pickle; its inputs have names."""
    if format == "pt2":
        program = torch.export.load(folder / "model.pt2")
        operators = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
        assert operators and all(
            name.startswith(("aten.", "<built-in function getitem>")) for name in operators
        )
        with zipfile.ZipFile(folder / "model.pt2") as archive:
            content = [archive.read(name) for name in archive.namelist()]
        assert not any(b"data.pkl" in one for one in content)
    if format == "onnx":
        graph = import_module("onnx").load(folder / "model.onnx").graph
        assert [one.name for one in graph.input] == ["dense", "ids"]
        assert [one.name for one in graph.output] == ["logit", "score"]
        assert {node.domain for node in graph.node} == {""}
        assert [node.op_type for node in graph.node].count("TopK") == masks


def test_levels_of_activations_are_in_the_graph(runs: dict[str, Path], tmp_path: Path) -> None:
    """A sum in another order may be another level: one row of 1,000 may be apart, as with masks."""
    model = saved(runs["levels"], rounds=True)
    assert [mask.bits for mask in model.masks.values()] == [4, 4]
    file = ModelFile(format="onnx", naming="ours", spec=model.spec, int8=False, masks=model.masks)
    file.write(tmp_path, model.tensors)
    batch = some_rows(runs["levels"], range(5 * ROWS))
    found = compare(model.score, file.scorer(tmp_path), [batch], lambda rows: None)
    assert found.is_equal(masked=True), found
    plain = saved(runs["levels"])
    assert [mask.bits for mask in plain.masks.values()] == [None, None]
    assert np.abs(plain.logits(batch) - model.logits(batch)).max() > 100 * TOLERANCE


def test_the_folder_has_the_vocabularies(runs: dict[str, Path], tmp_path: Path) -> None:
    assert export(runs["single"], tmp_path / "out", "export.format=safetensors") == 0
    shards = prepared(runs["single"])
    columns = json.loads((tmp_path / "out" / "model.json").read_text())["inputs"]["ids"]["columns"]
    assert [one["rows"] for one in columns] == list(shards.table_rows)
    for number, one in enumerate(columns, 1):
        keys = np.load(tmp_path / "out" / one["vocabulary"])
        source = shards.folder / "vocabulary" / f"{number}.npy"
        np.testing.assert_array_equal(keys, np.load(source))
        assert (one["name"], one["first_id"]) == (f"C{number}", 0)
        assert len(keys) == one["rows"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]  # no lock, no half folder


def test_weights_fit_into_facebooks_model(runs: dict[str, Path], tmp_path: Path) -> None:
    told = ("export.format=safetensors", "export.names=dlrm")
    assert export(runs["single"], tmp_path / "out", *told) == 0
    model = saved(runs["single"])
    other = DlrmNet(model.spec.bottom, model.spec.top, model.spec.table_rows)
    other.load_state_dict(safetensors.torch.load_file(tmp_path / "out" / "model.safetensors"))
    batch = some_rows(runs["single"], range(ROWS))
    with torch.no_grad():
        found = other(
            torch.from_numpy(batch.dense_BI), torch.from_numpy(batch.bags.values.T.copy())
        )
    expected = model.logits(batch)
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=TOLERANCE)


def test_weights_fit_into_torchrecs_model(runs: dict[str, Path], tmp_path: Path) -> None:
    told = ("export.format=safetensors", "export.names=torchrec")
    assert export(runs["single"], tmp_path / "out", *told) == 0
    model = saved(runs["single"])
    spec = model.spec
    tables = torchrec_tables(spec.table_rows, spec.embedding_dim)
    other = DLRM(tables, spec.bottom[0], [*spec.bottom[1:]], [*spec.top])
    # strict: TorchRec's own names, all of them
    other.load_state_dict(safetensors.torch.load_file(tmp_path / "out" / "model.safetensors"))
    batch = some_rows(runs["single"], range(ROWS))
    sparse = torchrec_rows(torch.from_numpy(batch.bags.values))
    with torch.no_grad():
        found = other(torch.from_numpy(batch.dense_BI), sparse).squeeze(1)
    expected = model.logits(batch)
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=TOLERANCE)


SPEC = ModelSpec(embedding_dim=4, bottom=(3, 5, 4), top=(6, 5, 1), table_rows=(7, 8, 9))


@pytest.mark.parametrize("naming", ["ours", "torchrec", "dlrm"])
def test_names_and_layouts_have_their_way_back(naming: Any) -> None:
    stream = torch.Generator().manual_seed(0)
    tensors = {name: torch.rand(s, generator=stream) for name, s in shapes_of(SPEC).items()}
    theirs = to_theirs(naming, SPEC, tensors)
    assert len(theirs) == len(tensors)
    back = to_ours(naming, SPEC, shapes_of(SPEC), theirs)
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


def test_torchrec_has_no_model_whose_top_is_one_layer() -> None:
    with pytest.raises(ConfigError, match=r"model\.top = \[1\]: TorchRec's OverArch has at least"):
        names_of("torchrec", replace(SPEC, top=(1,)), [])


floats = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)


@given(st.lists(st.lists(floats, min_size=4, max_size=4), min_size=1, max_size=9))
def test_no_quantised_value_is_off_by_more_than_half_a_step(values: list[list[float]]) -> None:
    table_RD = torch.tensor(values)
    spec = ModelSpec(embedding_dim=4, bottom=(1, 4), top=(1,), table_rows=(len(values),))
    found = quantised(spec, {"embedding.1.weight": table_RD})
    integers_RD = found["embedding.1.weight"]
    scale_R, offset_R = (found[f"embedding.1.weight_{kind}"] for kind in ("scale", "offset"))
    assert integers_RD.dtype == torch.uint8
    back_RD = integers_RD.double() * scale_R[:, None] + offset_R[:, None]
    span_R = (table_RD.double().amax(1) - table_RD.double().amin(1)) / LEVELS
    rounding_R = 1e-6 * table_RD.double().abs().amax(1) + 1e-44
    off_R = (back_RD - table_RD.double()).abs().amax(1)
    assert bool((off_R <= span_R / 2 * 1.001 + rounding_R).all())


def test_tables_of_8_bits_cost_less_than_the_bound(runs: dict[str, Path], tmp_path: Path) -> None:
    checkpoint = runs["single"]
    model = saved(checkpoint)
    file = ModelFile(format="safetensors", naming="ours", spec=model.spec, int8=True)
    batch = some_rows(checkpoint, range(7000))
    found = compare(model.score, file.expected(model.tensors), [batch], lambda rows: None)
    assert found.before.auc is not None and found.before.auc > 0.6
    assert found.auc_difference is not None and 0 < abs(found.auc_difference) < 0.0005
    assert not found.is_equal(masked=False)  # and the comparison sees the rounding


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["export.output=null"], "export.output = null: name a new folder"),
        (["export.checkpoint=null"], "export.checkpoint = null: name a run folder or one of its"),
        (["export.names=dlrm"], "export.names = 'dlrm': only applies to export.format=safetensors"),
        (["export.format=tf"], "export.format = 'tf': must be 'pt2' or 'onnx' or 'safetensors'"),
        (["export.check_rows=0"], "export.check_rows = 0: must be a whole number"),
        (["export.output=."], "export.output = .: not the name of a new folder"),
        (["model.top=[4,1]"], "model.top: `export` does not read it"),
    ],
)
def test_a_wrong_key_is_named_with_its_value(
    overrides: list[str],
    said: str,
    runs: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [f"export.checkpoint={runs['single']}", f"export.output={tmp_path / 'out'}"]
    kept = [one for one in given if one.partition("=")[0] not in overrides[0]]
    assert run(["dlrm_hybrid", "export", *kept, *overrides]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_what_is_there_is_not_replaced(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    assert export(runs["single"], tmp_path / "out") == 2
    assert f"export.output = {tmp_path / 'out'}: exists; name a new folder" in (
        capsys.readouterr().err
    )
    assert not list((tmp_path / "out").iterdir())


def test_no_checkpoint_is_a_fault_of_the_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(tmp_path / "none", tmp_path / "out") == 3
    assert f"{tmp_path / 'none'}: no checkpoint found" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_missing_package_is_named_with_how_to_get_it(
    runs: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert export(runs["single"], tmp_path / "out", "export.format=onnx") == 5
    assert capsys.readouterr().err == (
        "export.format = onnx: needs onnxruntime, which is not installed: "
        "pip install 'dlrm-hybrid[export]'\n"
    )
    assert not list(tmp_path.iterdir())


def perturbed(write: Callable[..., None]) -> Callable[..., None]:
    def written(file: ModelFile, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
        wrong = {name: tensor.clone() for name, tensor in tensors.items()}
        wrong["bottom.1.weight"][0, 0] += 0.1
        write(file, folder, wrong)

    return written


@pytest.mark.parametrize("int8", [False, True])
def test_a_file_that_is_another_model_is_refused(
    int8: bool,
    runs: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(ModelFile, "write", perturbed(ModelFile.write))
    told = ("export.format=safetensors", f"export.int8={str(int8).lower()}")
    assert export(runs["single"], tmp_path / "out", *told) == 3
    told_err = capsys.readouterr().err
    assert "model.safetensors: differs from " in told_err
    assert f"(at most {SCORE_TOLERANCE:g}), logits by " in told_err
    assert f"(at most {LOGIT_TOLERANCE:g})" in told_err
    assert not list(tmp_path.iterdir())


def test_a_killed_export_leaves_no_folder_and_the_next_one_is_whole(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_killed() -> None:
        monkeypatch.setattr(ModelFile, "scorer", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        export(runs["single"], tmp_path / "out", "export.format=safetensors")

    assert exit_code_of(is_killed) == -signal.SIGKILL
    assert (tmp_path / ".out.partial" / "model.safetensors").is_file()  # it was under way
    assert not (tmp_path / "out").exists()
    assert export(runs["single"], tmp_path / "out", "export.format=safetensors") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
