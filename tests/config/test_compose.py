import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra
from hypothesis import assume, example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from dlrm_hybrid.config.compose import job_of, shown, sweep_of, values_of
from dlrm_hybrid.config.overrides import override_fault, override_text, read_override
from dlrm_hybrid.types import ConfigError


def faults(*overrides: str, is_sweep: bool = False) -> list[str]:
    with pytest.raises(ConfigError) as error:
        (sweep_of if is_sweep else job_of)(overrides)
    head, *lines = str(error.value).splitlines()
    assert head.startswith(f"configuration: {len(lines)} fault")
    return [line.strip() for line in lines]


def test_a_program_may_use_hydra_itself() -> None:
    with hydra.initialize(version_base="1.3", config_path=None):
        theirs = GlobalHydra.instance().hydra
        assert values_of(["optimizer.lr=0.5"])["optimizer"]["lr"] == 0.5
        assert GlobalHydra.instance().hydra is theirs
    assert "hydra_plugins" not in sys.modules


def test_threads_may_compose_at_one_time() -> None:
    with ThreadPoolExecutor(4) as threads:
        found = threads.map(lambda lr: values_of([f"optimizer.lr={lr}"]), range(1, 9))
        assert [one["optimizer"]["lr"] for one in found] == list(range(1, 9))


def test_defaults_compose_and_hold() -> None:
    values = values_of([])
    assert values["data"]["name"] == "synthetic"
    assert values["train"]["batch_size"] == 128
    assert values["optimizer"]["lr"] == 0.1


def test_a_whole_number_is_an_integer_however_it_is_written() -> None:
    values = values_of(
        ["train.steps=2.0", "model.top=[5.12e2,1]", "train={seed: 3e0, epochs: 1e3}"]
    )
    train = values["train"]
    whole = (train["steps"], train["seed"], train["epochs"], *values["model"]["top"])
    assert repr(whole) == "(2, 3, 1000, 512, 1)"
    sweep = sweep_of(["train.batch_size=1e3,2e3"])
    assert [repr(sweep.job(one).values["train"]["batch_size"]) for one in (0, 1)] == [
        "1000",
        "2000",
    ]


@pytest.mark.parametrize("key", ["train.seed", "optimizer.lr"])
@pytest.mark.parametrize("digits", [400, 5_000])
def test_a_long_value_is_told_shortened(digits: int, key: str) -> None:
    (line,) = faults(f"{key}={'9' * digits}")
    assert line.startswith(key)
    assert len(line) <= 501


def test_faults_of_all_kinds_are_told_together() -> None:
    found = faults("optimizer.lrr=1", "model=huge", "train.batch_size=0", "precision=no")
    assert [line.partition(":")[0] for line in found] == [
        "optimizer.lrr",
        "model=huge",
        "precision = 'no'",
        "train.batch_size = 0",
    ]
    found = faults("activation=dct", "activation.bits=[4,9]", "activation.sparsity=[0.5,2]")
    assert sorted(line for line in found if "[1]" in line) == [
        "activation.bits[1] = 9: must be a whole number at least 3 and at most 8 or null",
        "activation.sparsity[1] = 2: must be a number at least 0 and below 1",
    ]  # a wrong item of a list is told once


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.seed=a\nb", "train.seed=a\\nb: cannot be parsed as key=value"),
        ("train={steps: 5, stepz: 1}", "train.stepz: unknown key; did you mean train.steps?"),
        ("optimizer={lrr: 1}", "optimizer.lrr: unknown key; did you mean optimizer.lr?"),
    ],
)
def test_a_fault_of_an_override_with_spaces_names_its_key(override: str, message: str) -> None:
    assert faults(override) == [message]


def test_faults_between_keys_are_told_with_those_of_single_keys() -> None:
    """Rules see right values in place of wrong ones, and are silent about these."""
    assert faults("train.seed=-1", "gradient=dct", "model.bottom=[12,16]", "optimizer.lr=fast") == [
        "optimizer.lr = 'fast': must be a number above 0 and at most 1e+18",
        "train.seed = -1: must be a whole number at least 0 and below 2^63",
        "model.bottom[0] = 12: must be 13, the integer features",
        "gradient = 'dct': needs a parameter server to send to; add parallel=hybrid",
    ]
    assert faults("train.batch_size=x", "parallel=hybrid", "schedule.microbatches=3") == [
        "train.batch_size = 'x': must be a whole number at least 1 and at most 1,048,576"
    ]
    assert faults("model=huge", "model.top=[2]") == [
        "model=huge: no such choice; choose from dcnv2, deepfm, dlrm_paper, dlrm_small"
    ]


def test_a_sweep_is_checked_value_by_value_before_it_starts() -> None:
    sweep = sweep_of(["optimizer.lr=0.05,0.1", "model=dlrm_small,dlrm_paper", "name=x"])
    assert sweep.points[1] == ("optimizer.lr=0.05", "model=dlrm_paper", "name=x")
    assert (len(sweep.points), sweep.keys) == (4, ("optimizer.lr", "model"))
    assert sweep.job(2).values["optimizer"]["lr"] == 0.1
    assert faults("optimizer.lr=0.1,-1", "train.batch_size=0,128", is_sweep=True) == [
        "train.batch_size = 0: must be a whole number at least 1 and at most 1,048,576",
        "optimizer.lr = -1: must be a number above 0 and at most 1e+18",
    ]


def test_an_experiment_sweeps_what_it_names_unless_the_command_line_does() -> None:
    sweep = sweep_of(["+experiment=paper_table2"])
    assert sweep.keys == ("gradient.density",)
    assert sweep.points[1] == ("gradient.density=0.25", "+experiment=paper_table2")
    sweep = sweep_of(["+experiment=paper_table2", "gradient.density=0.5", "train.seed=range(3)"])
    assert sweep.keys == ("train.seed",)
    assert [len(sweep.points), sweep.job(2).values["gradient"]["density"]] == [3, 0.5]
    assert len(sweep_of(["+experiment=paper_table2", "hydra.sweeper.params=null"]).points) == 1
    assert len(sweep_of(["model=glob(dlrm_*)"]).points) == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.seed=range(0,1000000000000)", "more than 10,000 values"),
        ("train.seed=shuffle(range(0,1000000000000))", "more than 10,000 values"),
        ("train.seed=range(0,9,0)", "a range needs start, stop and a step that is not 0"),
        ("train.seed=interval(0,1)", "a sweep needs single values: train.seed=1,2,3 or range(1,4)"),
        ("model=glob(x*)", "no such choice; choose from dcnv2, deepfm, dlrm_paper, dlrm_small"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused_at_once(override: str, message: str) -> None:
    assert faults(override, is_sweep=True) == [f"{override}: {message}"]


def test_parameters_that_no_sweep_has_are_refused_with_all_else() -> None:
    assert faults("hydra.sweeper.params=5", "train.seed=x", is_sweep=True) == [
        "hydra.sweeper.params = 5: must be null or {key: values, …}",
        "train.seed = 'x': must be a whole number at least 0 and below 2^63",
    ]


def test_a_sweep_of_too_many_jobs_is_refused() -> None:
    axes = ("train.epochs=range(1,30)", "train.steps=range(1,30)", "data.days=range(2,30)")
    assert faults(*axes, is_sweep=True) == ["-m: 23,548 jobs; a sweep has at most 10,000"]


TEXTS = st.text(st.characters(codec="utf-8")) | st.text("ab1 ,=:'\"\\\\${}[]()~é\t\n.*@")


@given(st.one_of(TEXTS, st.lists(TEXTS), st.lists(st.text("a\\", max_size=4))))
@example(["a\\", "b"])
@example("/data/a run, (x=1) of é")
@example("~/it's")
@example("1")
@example("null")
@example("a\\")
@example("\\\\${train.seed}\\\\")
def test_an_override_made_of_a_text_gives_it_back(value: str | list[str]) -> None:
    assume("???" not in value and value != "???")  # a value that is missing, to OmegaConf
    text = override_text("data.raw", value)
    assert override_fault(text) is None
    key, read = read_override(text)
    assert key == "data.raw"
    composed = OmegaConf.create({"raw": read})
    assert OmegaConf.to_container(composed, resolve=True) == {"raw": value}


@pytest.mark.parametrize("name", ["5", "2.0", "-1"])
def test_a_run_folder_may_be_named_by_a_number(name: str) -> None:
    assert job_of([f"hydra.run.dir={name}"]).folder == Path.cwd() / name


@pytest.mark.parametrize("text", ["runs/a-b_2.0", "/a/run-3", "a b"])
def test_a_plain_text_is_not_quoted(text: str) -> None:
    assert override_text("name", text) == f"name={text}"


def test_the_configuration_is_shown() -> None:
    assert "batch_size: 7" in shown(["train.batch_size=7"], "job", None, resolve=True)
    assert shown([], "job", "train.seed", resolve=False) == "0\n"
    assert "_target_: hydra" in shown([], "hydra", "hydra.launcher", resolve=False)
    with pytest.raises(ConfigError, match="--package nope: no such section"):
        shown([], "job", "nope", resolve=False)
