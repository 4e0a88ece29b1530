"""A method in a file outside the package: in `train`, a sweep, a world and DDP's hook."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch.nn import Linear, Sequential
from torch.nn.parallel import DistributedDataParallel

from dlrm_hybrid.cli.main import run
from dlrm_hybrid.compress import GradientMethod, ddp_hook
from dlrm_hybrid.compress.gradient.methods import find, load
from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.types import ConfigError
from dlrm_hybrid.world.world import World

FILE = Path(__file__).parent.parent / "compress" / "outside_method.py"
NAME = "my_package.signsgd:SignSgd"
WORLD = ("parallel=hybrid", "parallel.world=in_process", "parallel.trainers=2", "train.steps=6")
SPEC = ModelSpec(embedding_dim=4, bottom=(3, 8, 4), top=(8, 1), table_rows=(9, 9))


@pytest.fixture(autouse=True)
def my_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package of a user's own, which nobody has imported yet."""
    (tmp_path / "mine" / "my_package").mkdir(parents=True)
    (tmp_path / "mine" / "my_package" / "__init__.py").touch()
    shutil.copy(FILE, tmp_path / "mine" / "my_package" / "signsgd.py")
    monkeypatch.syspath_prepend(tmp_path / "mine")
    monkeypatch.setattr("dlrm_hybrid.config.outside._loaded", {})
    yield
    for name in [one for one in sys.modules if one.partition(".")[0] == "my_package"]:
        del sys.modules[name]


def test_train_learns_by_it_and_goes_on_where_it_is_typed(
    train: Callable[..., tuple[int, Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    options = (*WORLD, "checkpoint.every=3", "train.seed=5")
    code, folder = train("run", *options, f"gradient={NAME}", "gradient.smallest=64")
    assert code == 0
    config = json.loads((folder / "config.json").read_text())
    assert config["gradient"] == {"name": NAME, "smallest": 64}
    losses = json.loads((folder / "summary.json").read_text())["test"]
    checkpoint = folder / "checkpoints" / "step-3"
    if not checkpoint.is_dir():
        checkpoint = min((folder / "checkpoints").iterdir())
    del sys.modules["my_package.signsgd"]
    resume = f"checkpoint.resume={checkpoint}"
    code, again = train("again", *options, resume, f"gradient={NAME}", "gradient.smallest=64")
    assert code == 0
    assert json.loads((again / "summary.json").read_text())["test"] == losses
    del sys.modules["my_package.signsgd"]
    assert run(["dlrm_hybrid", "train", f"hydra.run.dir={folder}", "checkpoint.resume=auto"]) == 2
    assert f"imported only where gradient={NAME} is typed" in capsys.readouterr().err
    assert "my_package.signsgd" not in sys.modules


def test_a_sweep_has_it_beside_others(
    small_rows: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = tmp_path / "sweep"
    argv = ["dlrm_hybrid", "train", "-m", *small_rows, *WORLD, f"hydra.sweep.dir={sweep}"]
    assert run([*argv, f"gradient={NAME},topk"]) == 0
    names = [
        json.loads((sweep / job / "config.json").read_text())["gradient"]["name"] for job in "01"
    ]
    assert names == [NAME, "topk"]


def test_a_world_takes_its_record() -> None:
    record = load(NAME)()
    rows = (torch.rand(8, 3), torch.randint(9, (8, 2)), torch.randint(2, (8,)).float())
    with World.in_process(SPEC, trainers=2, cuts=[], gradient=record, batch_size=4) as world:
        assert world.config.gradient == record
        world.step(rows)


def test_the_hook_of_ddp_sends_signs() -> None:
    record: GradientMethod = load(NAME)(smallest=1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(Sequential(Linear(8, 4, bias=False)))
        state = record.ddp_state(model)
        model.register_comm_hook(state, ddp_hook)
        model(torch.rand(5, 8)).square().sum().backward()
        (weight,) = model.parameters()
        assert weight.grad is not None and weight.grad.abs().unique().numel() == 1
        assert [*state.state_dict()["tensors"]] == ["0.weight.residual"]
    finally:
        dist.destroy_process_group()


def test_help_and_messages_know_its_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["dlrm_hybrid", "train", f"gradient={NAME}", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"gradient={NAME}: Sends the signs of gradients times their mean magnitude" in text
    assert "gradient.smallest=32 tensors with fewer elements are sent in float32" in text
    with pytest.raises(ConfigError, match=r"gradient\.smallest = 0: must be a whole number at le"):
        values_of(["parallel=hybrid", f"gradient={NAME}", "gradient.smallest=0"])
    with pytest.raises(ConfigError, match=r"gradient\.smalest: unknown key; did you mean gradient"):
        values_of(["parallel=hybrid", f"gradient={NAME}", "gradient.smalest=3"])


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("my_package.nothing:SignSgd", "cannot be imported: ModuleNotFoundError: No module named"),
        (
            "nowhere:SignSgd",
            "cannot be imported: ModuleNotFoundError: No module named 'nowhere' (neither installed",
        ),
        ("my_package.signsgd:Nobody", "is no subclass of dlrm_hybrid.compress.GradientMethod"),
        ("os.path:join", "is no subclass of dlrm_hybrid.compress.GradientMethod"),
    ],
)
def test_what_is_no_method_is_refused(name: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        values_of(["parallel=hybrid", f"gradient={name}"])
    assert f"gradient={name}: {reason}" in str(caught.value)


def test_a_loaded_module_that_loads_more_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = ModuleType("lazy")
    monkeypatch.setattr(lazy, "__getattr__", lambda name: load(NAME), raising=False)
    monkeypatch.setitem(sys.modules, "lazy", lazy)
    assert find("lazy:SignSgd") is None
    assert "my_package.signsgd" not in sys.modules
