"""Experiments of a user's own: as those of conf/experiment, plain, checked with file and line."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_hybrid.cli.completion import words
from dlrm_hybrid.cli.help import help_text
from dlrm_hybrid.cli.main import run
from dlrm_hybrid.config import compose
from dlrm_hybrid.config.experiments import OwnExperiments, read
from dlrm_hybrid.types import ConfigError

Write = Callable[..., str]
MINE = """\
# Levels with larger batches.
defaults:
  - dct_levels
  - override /model: dlrm_small

train:
  batch_size: 256
optimizer:
  lr: 1e-2
"""
PROGRAMS = "bars_avazu_x1, bars_criteo_x1"


@pytest.fixture
def own(tmp_path: Path) -> Write:
    """Write experiments into a folder; returns the override that names it."""

    def write(**texts: str) -> str:
        for name, text in texts.items():
            path = tmp_path / "own" / "experiment" / f"{name}.yaml"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return f"conf={tmp_path / 'own'}"

    return write


def faults(overrides: list[str]) -> list[str]:
    with pytest.raises(ConfigError) as error:
        compose.job_of(overrides)
    return [line.strip() for line in str(error.value).splitlines()[1:]]


def test_it_is_as_if_its_values_were_typed(own: Write) -> None:
    conf = own(mine=MINE)
    values = compose.values_of([conf, "+experiment=mine"])
    typed = ["+experiment=dct_levels", "model=dlrm_small", "train.batch_size=256"]
    assert values == compose.values_of([*typed, "optimizer.lr=0.01", "name=mine", conf])


@pytest.mark.parametrize("last", [False, True])
def test_what_is_typed_wins_wherever_it_stands(own: Write, last: bool) -> None:
    typed = ["train.batch_size=5", "model=dcnv2", "name=other"]
    chosen = [own(mine=MINE), "+experiment=mine"]
    values = compose.values_of([*chosen, *typed] if last else [*typed, *chosen])
    assert values["train"]["batch_size"] == 5
    assert (values["model"]["name"], values["name"]) == ("dcnv2", "other")
    assert values["optimizer"]["lr"] == 0.01


def test_one_builds_upon_another_and_what_is_nearer_wins(own: Write) -> None:
    conf = own(
        mine=MINE,
        longer="defaults: [mine, override /gradient: sidco]\ntrain: {epochs: 3, batch_size: 64}\n",
    )
    values = compose.values_of([conf, "+experiment=longer"])
    assert (values["name"], values["gradient"]["name"]) == ("longer", "sidco")
    assert values["train"]["epochs"] == 3
    assert values["train"]["batch_size"] == 64
    assert values["parallel"]["cuts"] == ["bottom.4", "top.3"]
    assert compose.given_keys([conf, "+experiment=longer"])[1:] == [
        *("parallel", "gradient", "activation", "parallel.cuts", "gradient.precision"),
        *("activation.sparsity", "activation.bits", "pull.precision", "embedding.deduplicate"),
        *("embedding.levels", "model", "train.batch_size", "optimizer.lr", "gradient"),
        *("train.epochs", "train.batch_size"),
    ]


def test_two_that_build_upon_each_other_are_refused(own: Write) -> None:
    conf = own(a="defaults: [b]", b="defaults: [a]")
    folder = f"{conf.removeprefix('conf=')}/experiment"
    assert faults([conf, "+experiment=a"]) == [
        f"{folder}/a.yaml:1: b: builds upon a, which builds upon it",
        f"{folder}/b.yaml:1: a: builds upon b, which builds upon it",
    ]


def test_two_may_build_upon_the_same(own: Write) -> None:
    conf = own(
        a="defaults: [b, c]",
        b="defaults: [d]\ntrain: {steps: 7}",
        c="defaults: [d]\ntrain: {epochs: 2}",
        d="train: {seed: 8}",
    )
    train = compose.values_of([conf, "+experiment=a"])["train"]
    assert (train["seed"], train["steps"], train["epochs"]) == (8, 7, 2)


def test_a_section_is_no_hint_for_a_key_in_it(own: Write) -> None:
    (line,) = faults([own(it="parallel:\n  foo: 3"), "+experiment=it"])
    assert line.endswith("it.yaml:2: parallel.foo: unknown key")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("train:\n  batch: 3", ["2: train.batch: unknown key; did you mean train.batch_size?"]),
        ("\nhydra:\n  run: {dir: x}", ["2: hydra: of Hydra's own keys hydra.run.dir, "]),
        ("train:\n  _target_: os.system", ["2: train._target_: not a plain value"]),
        ("_target_: os.system", ["1: _target_: not a plain value"]),
        ("data:\n  raw: {_target_: x}", ["2: data.raw._target_: not a plain value"]),
        ("name: ${oc.env:HOME}", ["1: name: ${oc.env:HOME}: must be a plain value"]),
        ("model:\n  top:\n    - 1\n    - ${x}", ["4: model.top: ${x}: must be a plain value"]),
        ("name: !!python/name:os.system x", ["1: name: tag:yaml.org,2002:python/name:os.system"]),
        ("train.seed: 3", ["1: train.seed: a section is a line of its own"]),
        ("gradient: dct", ["1: gradient: is a section; in defaults, - override /gradient: … ch"]),
        ("gradient:\n  name: dct", ["2: gradient.name: sets only the name; in defaults, - overr"]),
        ("defaults:\n  - override /model: no", ["2: model=no: no such choice; choose from dcnv2"]),
        ("defaults:\n  - hydra/launcher: x", ["2: must be `override /GROUP: CHOICE`, or an exp"]),
        ("defaults:\n  - override /model: [a]", ["2: must be `override /GROUP: CHOICE`, or an e"]),
        ("defaults:\n  - ../../x", [f"2: ../../x: no such choice; choose from {PROGRAMS}"]),
        ("defaults: [it]", [f"1: it: no such choice; choose from {PROGRAMS}"]),
        ("train:\n  steps: ???", ["2: train.steps: ???: must be a value"]),
        ("model:\n  top: [1, '???']", ["2: model.top: ???: must be a value"]),
        *(
            (f"train:\n  seed: {number}", [f"2: train.seed: {number[:20]}…: "])
            for number in (
                "9" * 5_000,
                f"-0x{'F' * 5_000}",
                f"0b{'1' * 20_000}",
                "59:" * 3_000 + "0",
            )
        ),
        (
            "model:\n  top: [1, 0x" + "F" * 5_000 + "]",
            ["2: model.top: 0xFFFFFFFFFFFFFFFFFF…: 5,002 "],
        ),
        ("conf: other", ["1: conf: can be typed, and nowhere else"]),
        ("defaults:\n  - dct_dp\n  - dct_dp", ["3: dct_dp: stands here twice"]),
        (
            "defaults:\n  - override /model: dcnv2\n  - override /model: deepfm",
            ["3: model=deepfm: model is chosen twice"],
        ),
        ("a: &x 1\nb: *x", ["2: aliases (*) are not allowed"]),
        ("train:\n  seed: 1\n  seed: 2", ["3: not YAML: found duplicate key seed"]),
        ("train: [", ["1: not YAML: "]),
        ("a: 1\n? [b]\n: 2", ["1: a: unknown key", "2: ?: unknown key"]),
    ],
)
def test_a_fault_of_a_file_has_its_line(own: Write, text: str, told: list[str]) -> None:
    found = faults([conf := own(it=text), "+experiment=it"])
    path = f"{conf.removeprefix('conf=')}/experiment/it.yaml"
    assert len(found) == len(told)
    for line, begins in zip(found, told, strict=True):
        assert line.startswith(f"{path}:{begins}"), line


def test_a_fault_of_a_value_has_the_line_that_sets_it(own: Write) -> None:
    conf = own(it="train:\n  epochs: 0\n  seed: x\noptimizer: {lr: -1}\n")
    path = f"{conf.removeprefix('conf=')}/experiment/it.yaml"
    assert faults([conf, "+experiment=it", "train.seed=y", "train.batch_size=0"]) == [
        f"{path}:4: optimizer.lr = -1: must be a number above 0 and at most 1e+18",
        "train.batch_size = 0: must be a whole number at least 1 and at most 1,048,576",
        f"{path}:2: train.epochs = 0: must be a whole number at least 1 and below 2^63",
        "train.seed = 'y': must be a whole number at least 0 and below 2^63",
    ]


def test_values_that_do_not_go_together_have_a_line_too(own: Write) -> None:
    conf = own(it="parallel: {trainers: 2}\nsync:\n  staleness: 3\n")
    path = f"{conf.removeprefix('conf=')}/experiment/it.yaml"
    assert faults([conf, "+experiment=it"]) == [
        f"{path}:1: parallel.trainers = 2: has no effect with parallel=single; only applies to "
        "parallel=hybrid",
        f"{path}:3: sync.staleness = 3: has no effect with sync=sync; only applies to sync=bounded",
    ]


def test_a_folder_without_experiments_is_refused(tmp_path: Path, own: Write) -> None:
    none, empty = tmp_path / "none", tmp_path / "empty"
    empty.mkdir()
    assert faults([f"conf={none}"]) == [
        f"conf = {none}: must be a folder, with experiment/NAME.yaml"
    ]
    assert faults([f"conf={empty}"]) == [f"conf = {empty}: has no experiment/*.yaml"]
    assert faults(["conf=[a,b]"]) == ["conf=[a,b]: must be one folder, with experiment/NAME.yaml"]
    for composed in (compose.job_of, compose.sweep_of):  # what it would have, nobody knows
        with pytest.raises(ConfigError, match="1 fault\n"):
            composed([f"conf={none}", "+experiment=mine"])
    taken = own(dct_levels="name: x")
    assert "the program has an experiment of this name; rename it" in faults([taken])[0]


@pytest.mark.parametrize("name", ["2024", "null", "true", "1e5", "nan"])
def test_a_name_that_an_override_reads_as_another_value_is_refused(own: Write, name: str) -> None:
    (line,) = faults([own(**{name: ""})])
    assert line.endswith(f"{name}.yaml: its name reads as a value, not as text; rename it")


def test_a_name_that_an_override_could_not_say_is_refused(own: Write) -> None:
    assert "a=b.yaml: its name must be letters, digits, _ and -" in faults([own(**{"a=b": ""})])[0]


@pytest.mark.parametrize("name", [".#mine", "._mine"])
def test_hidden_files_beside_it_are_no_experiments(own: Write, name: str) -> None:
    conf = own(mine=MINE, **{name: "not: [an experiment"})
    assert [*OwnExperiments.of([conf]).files] == ["mine"]


def test_the_folder_is_not_forced(own: Write) -> None:
    conf = own(mine=MINE)
    assert faults([f"++{conf}"]) == [f"++{conf}: write {conf}"]
    assert faults([conf, "+experiment=mine", "++conf=x"]) == ["++conf=x: write conf=x"]


def test_an_experiment_that_is_nowhere_is_met_with_all_there_are(own: Write) -> None:
    (line,) = faults([own(mine=MINE), "+experiment=min"])
    assert line.startswith("+experiment=min: no such choice; choose from bars_avazu_x1, ")
    assert line.endswith(", mine; did you mean +experiment=mine?")


def test_a_sweep_runs_over_own_experiments(own: Write) -> None:
    conf = own(mine=MINE, other="train: {seed: 7}")
    swept = compose.sweep_of([conf, "+experiment=mine,other,baseline", "train.epochs=1,2"])
    jobs = [swept.job(number) for number in range(len(swept.points))]
    assert [(job.values["name"], job.values["train"]["epochs"]) for job in jobs] == [
        *(("mine", 1), ("mine", 2), ("other", 1), ("other", 2), ("baseline", 1), ("baseline", 2))
    ]
    assert all(conf in job.overrides for job in jobs)
    assert swept.keys == ("experiment", "train.epochs")
    globbed = compose.sweep_of([conf, "+experiment=glob([m*,o*],exclude=mlperf*)"])
    names = [globbed.job(number).values["name"] for number in range(len(globbed.points))]
    assert names == ["methods", "mine", "other"]


def test_a_sweep_has_one_folder_and_files_without_faults(own: Write) -> None:
    conf = own(mine=MINE, bad="train: {seeds: 7}")
    with pytest.raises(ConfigError, match=r"bad\.yaml:1: train\.seeds: unknown key"):
        compose.sweep_of([conf, "+experiment=mine,bad"])
    with pytest.raises(ConfigError, match="must be one folder"):
        compose.sweep_of([f"{conf},x", "+experiment=mine"])


def test_help_and_completion_know_them(own: Write) -> None:
    conf = own(mine=MINE)
    shown = help_text("train", compose.values_of([conf]))
    assert "| mine\n" in shown
    assert "conf=" in shown
    assert words(f"dlrm_hybrid train {conf} +experiment=mi") == ["+experiment=mine"]
    assert words("dlrm_hybrid train +experiment=mi") == []
    assert words("dlrm_hybrid train con") == ["conf="]


def test_nothing_of_one_folder_is_left_for_the_next_command(own: Write) -> None:
    compose.values_of([own(mine=MINE), "+experiment=mine"])
    assert faults(["+experiment=mine"])[0].startswith("+experiment=mine: no such choice")


def test_a_run_of_ones_own_is_evaluated_by_the_same_command_line(
    own: Write, small_rows: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    conf = own(
        mine="defaults:\n  - override /gradient: topk\n  - override /parallel: hybrid\n"
        "parallel: {trainers: 1, cuts: [], world: in_process}\ntrain: {steps: 3}\n"
    )
    given = [*small_rows, conf, "+experiment=mine"]
    assert run(["dlrm_hybrid", "train", *given, f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    assert run(["dlrm_hybrid", "evaluate", *given, f"evaluate.checkpoint={tmp_path / 'run'}"]) == 0
    assert conf in (tmp_path / "run" / "overrides.yaml").read_text()


YAML_PARTS = st.sampled_from(
    [
        *("defaults:", "  - ", "train:", "  seed: ", "1e-3", "&a ", "*a", "!!set ", "${x}", "\n"),
        *("hydra:", "_target_: ", "{", "}", "[", "]", "? ", ": ", "override /model: dcnv2", "'"),
        *("dct_levels", "\t", "null", "|\n  x", "--- ", "...", "%YAML 2.0\n", "é", "\x00", "# x"),
    ]
)


@given(st.lists(YAML_PARTS | st.text(max_size=4), max_size=30).map("".join))
def test_any_text_is_an_experiment_or_refused_with_its_file(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(text.encode(errors="surrogatepass"))
    try:
        found = read(path, ("dct_levels",))
    except ConfigError as error:
        assert all(line.startswith(str(path)) for line in str(error).splitlines())
    else:
        assert "hydra" not in found.values
        assert isinstance(found.values["defaults"], list)


def test_of_several_folders_the_last_counts(own: Write) -> None:
    conf = own(mine=MINE)
    assert [*OwnExperiments.of(["conf=nowhere", conf]).files] == ["mine"]
    assert OwnExperiments.of([conf, "conf=null"]) == OwnExperiments()
