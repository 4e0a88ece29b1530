"""A model, a schedule and a sync policy in files outside the package, which nobody knows of."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from world_runs import assert_same, assert_same_state, summary, tensors

from dlrm_hybrid.cli.main import run
from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.config.outside import load_chosen
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.types import ConfigError

NAME = "outside_model:DeepFm"
MODEL, ARRIVAL = f"model={NAME}", "sync=outside_world:OnArrival"
LATE, LONE = "schedule=outside_world:LateBackward", ("parallel.cuts=[]",)
WORLD = ("parallel=hybrid", "train.steps=8", "checkpoint.every=4", "checkpoint.keep=9")
IN_PROCESS = "parallel.world=in_process"
Trained = Callable[..., Path]


@pytest.fixture(autouse=True)
def nobody_has_loaded_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlrm_hybrid.config.outside._loaded", {})
    for name in ("outside_model", "outside_world"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        validate(values_of(overrides))
    return str(caught.value)


def test_a_sync_policy_of_ones_own_trains(trained: Trained) -> None:
    """With one trainer it is lock-step, bit for bit; with two each push makes a version."""
    one = ("parallel.trainers=1", "parallel.cuts=[bottom.2]", IN_PROCESS)
    expected = trained("expected", *WORLD, *one)
    found = trained("found", *WORLD, *one, ARRIVAL)
    for step in (4, 8):
        assert_same(expected, found, step)
    checkpoint = found / "checkpoints" / "step_00000004"
    resumed = trained("resumed", *WORLD, *one, ARRIVAL, f"checkpoint.resume={checkpoint}")
    assert_same_state(resumed, found, 8)
    several = trained("several", *WORLD, "parallel.trainers=2", "parallel.cuts=[]", ARRIVAL)
    assert summary(several)["status"] == "complete"
    assert (tensors(several, 4)["top.1.weight"] != tensors(several, 8)["top.1.weight"]).any()


def test_a_run_is_scored_without_what_trained_it(trained: Trained, tmp_path: Path) -> None:
    """A schedule, a policy and a method decide no score; nobody has to type them again."""
    own = LATE, ARRIVAL, "gradient=outside_world:Whole", "train.evaluate_every=8"
    found = trained("found", *WORLD, "parallel.trainers=1", *LONE, IN_PROCESS, *own)
    scores = tmp_path / "scores.json"
    run(["dlrm_hybrid", "evaluate", f"evaluate.checkpoint={found}", f"evaluate.output={scores}"])
    assert json.loads(scores.read_text())["log_loss"] == summary(found)["test"]["loss"]


def test_a_schedule_of_ones_own_keeps_batches_in_flight(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    own = (
        "parallel.cuts=[bottom.2,top.1]",
        "schedule=outside_world:LateBackward",
        "schedule.late=2",
    )
    expected = trained("expected", *WORLD, *own, IN_PROCESS)
    found = trained("found", *WORLD, *own)
    for step in (4, 8):
        assert_same_state(found, expected, step)
    checkpoint = expected / "checkpoints" / "step_00000004"
    resumed = trained("resumed", *WORLD, *own, IN_PROCESS, f"checkpoint.resume={checkpoint}")
    assert_same_state(resumed, expected, 8)
    lockstep = trained("lockstep", *WORLD, own[0], IN_PROCESS)
    assert (tensors(lockstep, 8)["top.1.weight"] != tensors(expected, 8)["top.1.weight"]).any()


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (("schedule=outside_world:Backwards",), "stages wait for each other: stage 0 for B"),
        (("schedule=outside_world:OnArrival",), "is no subclass of dlrm_hybrid.parallel.schedule"),
        ((LATE, "schedule.late=0"), "schedule.late = 0: must be a whole number"),
        ((LATE, "sync=async", "embedding=served"), "trainers are given batches one by one"),
        (("sync=outside_world:Alone",), "needs a policy with shares_versions"),
        (("sync=outside_world:NoDataclass",), "must be a dataclass: @dataclass(frozen=True"),
        (("sync=outside_world:NoPolicy",), "has no method policy"),
        ((ARRIVAL, "parallel.elastic=true"), f"needs sync=sync or async, not {ARRIVAL[5:]}"),
        ((ARRIVAL, "gradient=cltk"), "needs sync=sync"),
        (("sync=no_such:It",), "sync=no_such:It: cannot be imported: ModuleNotFoundError"),
        (("model=no_such:It",), "model=no_such:It: cannot be imported: ModuleNotFoundError"),
        (("model=outside_model:No",), "model=outside_model:No: is no subclass of torch.nn.Module"),
        ((MODEL, "parallel.cuts=[bottom.1]"), "no layer bottom.1 to cut after; choose from bott"),
        ((MODEL, "parallel.cuts=[bottom4,interaction]"), "interaction would be a stage without pa"),
        ((MODEL, *LONE, "activation=dct"), "needs parallel.cuts, e.g. parallel.cuts=[bottom2]"),
        ((MODEL, *LONE, "precision=bfloat16"), "precision = 'bfloat16': a model of your own"),
        ((MODEL, *LONE, "model.dropout=0.1"), "model.dropout"),
        ((MODEL, *LONE, "model.top=[x]"), "model.top[0] = 'x': must be a whole number"),
        (("model=outside_model:Narrow", "model.top=[8]"), "fm, dlrm_paper or dlrm_small\n"),
        ((MODEL, *LONE, "model.top=[]"), "its constructor raised IndexError"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(overrides: tuple[str, ...], told: str) -> None:
    given = () if overrides[0].startswith("model") else ("parallel.cuts=[bottom.2]",)
    assert told in refused("parallel=hybrid", *given, *overrides)


def test_help_knows_the_settings_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["dlrm_hybrid", "train", MODEL, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert MODEL in text
    assert "widths of the layers over all vectors, but the last" in text


def test_what_a_file_names_is_not_imported(tmp_path: Path) -> None:
    """Neither an experiment of somebody's folder nor a saved configuration runs anything."""
    (tmp_path / "experiment").mkdir()
    file = tmp_path / "experiment" / "mine.yaml"
    chosen = {
        "gradient": {"name": "outside_world:Whole", "smallest": 64},
        "model": {"name": NAME, "embedding_dim": 4, "dense": 13, "tables": 26, "top": [8]},
        "schedule": {"name": "outside_world:LateBackward", "late": 2},
        "sync": {"name": "outside_world:OnArrival"},
    }
    for group, values in chosen.items():
        file.write_text(f"defaults:\n  - override /{group}: {values['name']}\n")
        with pytest.raises(ConfigError, match="no such choice"):
            values_of([f"conf={tmp_path}", "+experiment=mine"])
    config = validate({**values_of(["parallel=hybrid"]), **chosen})
    assert {group: config.settings()[group] for group in chosen} == chosen
    for use in (build.topology, build.pipeline, build.policy):
        with pytest.raises(ConfigError, match="is from outside the package"):
            use(config)
    with pytest.raises(ConfigError, match="imported only where"):
        config.gradient.build(None)  # pyright: ignore[reportArgumentType]
    assert not {"outside_model", "outside_world"} & set(sys.modules)


def test_a_rank_that_cannot_import_a_choice_says_why() -> None:
    with pytest.raises(ConfigError, match=r"sync = no_such:It: cannot be imported: ModuleNotF"):
        load_chosen({"sync": {"name": "no_such:It"}}, ["sync"])


def test_a_run_goes_on_where_they_are_typed(
    trained: Trained,
    small_rows: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who types the path alone has the settings of the run."""
    folder = trained("run", *WORLD, IN_PROCESS, "parallel.cuts=[]", MODEL, "model.top=[8]")
    (folder / "summary.json").unlink()
    shutil.rmtree(folder / "checkpoints" / "step_00000008")
    (folder / "checkpoints" / "latest").unlink()
    monkeypatch.setattr("dlrm_hybrid.config.outside._loaded", {})
    again = ["dlrm_hybrid", "train", f"hydra.run.dir={folder}", "checkpoint.resume=auto"]
    assert run(again) == 2
    assert f"imported only where {MODEL} is typed" in capsys.readouterr().err
    assert run([*again, MODEL, small_rows[1]]) == 0
    assert json.loads((folder / "config.json").read_text())["model"]["top"] == [8]
