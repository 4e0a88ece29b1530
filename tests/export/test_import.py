"""Weights of other programs become checkpoints; what does not fit is named, all of it."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from dlrm_net import DlrmNet, torchrec_rows, torchrec_tables
from hypothesis import given
from hypothesis import strategies as st
from torchrec.models.dlrm import DLRM

from dlrm_hybrid.checkpoint.folder import find, read_facts
from dlrm_hybrid.checkpoint.reader import open_checkpoint
from dlrm_hybrid.cli.main import run
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.data.loader import Batch, sequential_batches
from dlrm_hybrid.data.shards import Shards, open_shards
from dlrm_hybrid.export import weights
from dlrm_hybrid.model.layers.products import Precision
from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.saved.model import SavedModel
from dlrm_hybrid.types import DataError

BOTTOM, TOP = (4, 32, 16, 8, 4), (32, 16, 8, 1)
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def shards(small_rows: list[str]) -> Shards:
    return open_shards(Path(small_rows[1].partition("=")[2]), None)


@pytest.fixture(scope="module")
def facebooks(shards: Shards) -> DlrmNet:
    torch.manual_seed(5)
    return DlrmNet(BOTTOM, TOP, shards.table_rows)


@pytest.fixture(scope="module")
def batch(shards: Shards) -> Batch:
    (batch,) = sequential_batches(shards, range(1000), 1000)
    return batch


@pytest.fixture
def import_(small_rows: list[str], tmp_path: Path) -> Callable[..., tuple[int, Path]]:
    """Exit code and run folder."""

    def imported(file: Path, *overrides: str) -> tuple[int, Path]:
        rows = [one for one in small_rows if not one.startswith("telemetry")]
        given = (f"import.file={file}", f"import.output={tmp_path / 'theirs'}", *overrides)
        return run(["dlrm_hybrid", "import", *rows, *given]), tmp_path / "theirs"

    return imported


def saved_by_facebook(net: DlrmNet) -> dict[str, Any]:
    """What dlrm_s_pytorch.py saves: counts, figures of numpy's, weights, the optimizer."""
    return {
        "epoch": 0,
        "nepochs": 1,
        "nbatches": 100,
        "nbatches_test": 10,
        "iter": 100,
        "train_loss": 0.5,
        "total_loss": 50.0,
        "test_acc": np.float64(0.75),
        "test_auc": np.float32(0.7),
        "correct": np.int64(3),
        "state_dict": net.state_dict(),
        "opt_state_dict": torch.optim.SGD(net.parameters(), lr=0.1).state_dict(),
    }


def logits_of(checkpoint: Path, shards: Shards, batch: Batch) -> Any:
    folder = find(checkpoint)
    config = validate(read_facts(folder)["config"])
    model = SavedModel.load(config, folder, shards.manifest, Precision.FLOAT32)
    return model.logits(batch)


def test_facebooks_model_scores_the_same_and_goes_back(
    facebooks: DlrmNet,
    shards: Shards,
    batch: Batch,
    import_: Callable[..., tuple[int, Path]],
    small_rows: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch.save(saved_by_facebook(facebooks), tmp_path / "dlrm.pt")
    code, folder = import_(tmp_path / "dlrm.pt", "optimizer=momentum")
    assert code == 0
    shown = capsys.readouterr().out
    state = facebooks.state_dict()
    count = sum(one.numel() for one in state.values())
    assert f"took {len(state)} tensors, {count:,} parameters" in shown
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dlrm.pt", "theirs"]

    with torch.no_grad():
        ids = torch.from_numpy(batch.bags.values.T.copy())
        expected = facebooks(torch.from_numpy(batch.dense_BI), ids).numpy()
    assert expected.std() > 0.01
    found = logits_of(folder, shards, batch)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)

    given = (f"export.checkpoint={folder}", f"export.output={tmp_path / 'back'}")
    told = ("export.format=safetensors", "export.names=dlrm")
    assert run(["dlrm_hybrid", "export", *given, *told]) == 0
    back = safetensors.torch.load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)

    output = tmp_path / "scores.json"
    argv = ["evaluate", f"evaluate.checkpoint={folder}", f"evaluate.output={output}"]
    assert run(["dlrm_hybrid", *argv]) == 0
    assert json.loads(output.read_text())["rows"] == 1000
    # and a world of stages learns on from it
    world = ("parallel=hybrid", "parallel.world=in_process", "gradient=dct", "optimizer=momentum")
    told = ("train.steps=3", f"checkpoint.resume={folder}", f"hydra.run.dir={tmp_path / 'on'}")
    assert run(["dlrm_hybrid", "train", *small_rows, *world, *told]) == 0
    before, after = (open_checkpoint(find(one)) for one in (folder, tmp_path / "on"))
    moved = after.tensor("top.1.weight") - before.tensor("top.1.weight")
    assert 0 < float(moved.abs().max()) < 0.2


def plain(net: DlrmNet, path: Path) -> None:
    torch.save(net.state_dict(), path)


def of_an_old_torch(net: DlrmNet, path: Path) -> None:
    torch.save(saved_by_facebook(net), path, _use_new_zipfile_serialization=False)


def wrapped(net: DlrmNet, path: Path) -> None:
    torch.save({f"module.{name}": one for name, one in net.state_dict().items()}, path)


def halves(net: DlrmNet, path: Path) -> None:
    torch.save({name: one.half() for name, one in net.state_dict().items()}, path)


@pytest.mark.parametrize("save", [plain, of_an_old_torch, wrapped, halves])
def test_any_file_of_torch_save_will_do(
    save: Callable[[DlrmNet, Path], None], facebooks: DlrmNet, tmp_path: Path
) -> None:
    save(facebooks, tmp_path / "dlrm.pt")
    rows = tuple(len(table.weight) for table in facebooks.emb_l)  # type: ignore[attr-defined]
    spec = ModelSpec(embedding_dim=4, bottom=BOTTOM, top=TOP, table_rows=rows)
    read = weights.read(tmp_path / "dlrm.pt")
    found = weights.fitted(tmp_path / "dlrm.pt", read, "dlrm", spec)
    expected = facebooks.state_dict()["bot_l.2.bias"]
    if save is halves:
        expected = expected.half().float()
    assert found["bottom.2.bias"].dtype == torch.float32
    assert torch.equal(found["bottom.2.bias"], expected)


def test_torchrecs_model_scores_the_same(
    shards: Shards, batch: Batch, import_: Callable[..., tuple[int, Path]], tmp_path: Path
) -> None:
    torch.manual_seed(6)
    net = DLRM(torchrec_tables(shards.table_rows, 4), BOTTOM[0], [*BOTTOM[1:]], [*TOP])
    # as DLRMTrain names them
    state = {f"model.{name}": tensor for name, tensor in net.state_dict().items()}
    safetensors.torch.save_file(state, tmp_path / "m.safetensors")
    code, folder = import_(tmp_path / "m.safetensors", "import.names=torchrec")
    assert code == 0
    sparse = torchrec_rows(torch.from_numpy(batch.bags.values))
    with torch.no_grad():
        expected = net(torch.from_numpy(batch.dense_BI), sparse).squeeze(1).numpy()
    found = logits_of(folder, shards, batch)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


def test_every_mismatch_is_named_in_one_message(
    facebooks: DlrmNet,
    import_: Callable[..., tuple[int, Path]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    state = dict(facebooks.state_dict())
    rows = len(state["emb_l.3.weight"])
    del state["bot_l.2.bias"]
    state["v_W_l.0"] = torch.zeros(5)
    state["emb_l.3.weight"] = torch.zeros(rows + 1, 4)
    state["emb_l.4.weight"] = state["emb_l.4.weight"].double()
    state["top_l.0.bias"] = torch.full((32,), float("nan"))
    torch.save(state, tmp_path / "dlrm.pt")
    code, _ = import_(tmp_path / "dlrm.pt")
    assert code == 3
    head, *lines = capsys.readouterr().err.splitlines()
    assert head == (
        f"{tmp_path / 'dlrm.pt'}: 5 tensors do not fit the model (import.file, import.names=dlrm)"
    )
    assert sorted(lines) == sorted(
        [
            "  bot_l.2.bias: missing, wanted [16]",
            "  v_W_l.0: unexpected, [5]",
            f"  emb_l.3.weight: [{rows + 1}, 4], wanted [{rows}, 4]",
            "  emb_l.4.weight: torch.float64, wanted torch.float32, torch.float16, torch.bfloat16",
            "  top_l.0.bias: holds values that are not finite",
        ]
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dlrm.pt"]


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("executed",)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, r"dlrm.pt: No such file or directory \(import.file\)"),
        (b"", "cannot be read as weights: "),
        (b"no weights", "cannot be read as weights: "),
        (pickle.dumps(Evil()), "cannot be read as weights: "),
        (pickle.dumps([1, 2]), "cannot be read as weights: "),
    ],
)
def test_a_file_that_is_none_is_refused_and_never_executed(
    content: bytes | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "dlrm.pt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=said):
        weights.read(path)
    assert not Path("executed").exists()


@pytest.mark.parametrize("value", [Evil(), {"state_dict": Evil()}])
def test_objects_in_a_file_of_torch_are_never_made(
    value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(value, tmp_path / "dlrm.pt")
    with pytest.raises(DataError, match=r"cannot be read as weights: .*\(import\.file\)") as error:
        weights.read(tmp_path / "dlrm.pt")
    assert not Path("executed").exists()
    # torch would have the reader set it to False
    assert "weights_only" not in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([torch.zeros(1)], r"holds a list, not tensors by name \(import\.file\)"),
        ({"iter": 5, "loss": 0.5}, r"iter, loss: no tensor \(import\.file\)"),
        ({}, r"holds no tensors \(import\.file\)"),
        ({"state_dict": {}}, r"holds no tensors \(import\.file\)"),
        ({"a": torch.ones(2, device="meta")}, r"a: is torch\.strided on the device meta, not a d"),
        ({"a": torch.eye(2).to_sparse()}, r"a: is torch\.sparse_coo on the device cpu, not a den"),
        ({"a": torch.nested.as_nested_tensor([torch.ones(1), torch.ones(2)])}, r"a: is nested, n"),
    ],
)
def test_what_holds_no_tensors_by_name_is_refused(value: Any, said: str, tmp_path: Path) -> None:
    torch.save(value, tmp_path / "dlrm.pt")
    with pytest.raises(DataError, match=said):
        weights.read(tmp_path / "dlrm.pt")


@pytest.fixture(scope="module", params=["zip", "legacy", "safetensors"])
def small_file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    state = {"bot_l.0.weight": torch.ones(3, 2), "bot_l.0.bias": torch.zeros(3)}
    folder = tmp_path_factory.mktemp("small")
    if request.param == "safetensors":
        safetensors.torch.save_file(state, folder / "m.safetensors")
        return folder / "m.safetensors"
    zipped = request.param == "zip"
    torch.save({"state_dict": state}, folder / "m.pt", _use_new_zipfile_serialization=zipped)
    return folder / "m.pt"


@given(data=st.data())
def test_damaged_files_are_refused_or_read_but_nothing_else(
    small_file: Path, data: st.DataObject
) -> None:
    content = bytearray(small_file.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] = data.draw(st.integers(0, 255))
    damaged = small_file.with_name(f"damaged{small_file.suffix}")
    damaged.write_bytes(bytes(content[: data.draw(st.integers(0, len(content)))]))
    try:
        found = weights.read(damaged)
    except DataError as error:
        assert str(damaged) in str(error)
    else:
        assert all(isinstance(one, torch.Tensor) for one in found.values())


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["import.file=null"], "import.file = null: name the file of weights"),
        (["import.output=null"], "import.output = null: name a new folder"),
        (["import.names=keras"], "import.names = 'keras': must be 'ours' or 'torchrec' or 'dlrm'"),
        (["parallel=hybrid"], "parallel: `import` does not read it"),
        (["import.output=."], "import.output = .: not the name of a new folder"),
    ],
)
def test_a_wrong_key_is_named_with_its_value(
    overrides: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [f"import.file={tmp_path / 'x.pt'}", f"import.output={tmp_path / 'out'}"]
    kept = [one for one in given if one.partition("=")[0] not in overrides[0]]
    assert run(["dlrm_hybrid", "import", *kept, *overrides]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
