"""What `--help` says, and how mistakes are met."""

import shlex

import pytest

from dlrm_hybrid.cli.help import READS, VERBS, groups_read, help_text, keys_read, line_of
from dlrm_hybrid.cli.main import run
from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.config.identity import flat
from dlrm_hybrid.config.keys import all_groups, all_keys

# Their group's choice, not keys to set.
NAMES = {f"{group}.name" for group in all_groups()}


def faults(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert run(["dlrm_hybrid", *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    head, *lines = told.err.splitlines()
    assert head.startswith("configuration: ")
    return [line.strip() for line in lines]


@pytest.mark.parametrize("verb", VERBS)
def test_every_key_of_a_verb_has_its_line(verb: str) -> None:
    assert [
        key.name for key in keys_read(verb) if key.name not in NAMES and not line_of(key.name)
    ] == []


def test_every_key_is_read_by_a_verb_and_every_choice_says_what_its_keys_mean() -> None:
    read = {key.name for verb in READS for key in keys_read(verb)}
    assert read == set(all_keys())
    missing = [
        f"{group}={choice}: {name}"
        for group, choices in all_groups().items()
        for choice in choices
        for name in all_keys()
        if name.startswith(f"{group}.") and name not in NAMES and not line_of(name, choice)
    ]
    assert missing == []


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_lists_what_it_reads_on_80_columns(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["dlrm_hybrid", verb, "--help"]) == 0
    text = capsys.readouterr().out
    assert max(len(line) for line in text.splitlines()) <= 80
    assert f"  python -m dlrm_hybrid {verb}" in text
    for group in groups_read(verb):
        assert (
            f"  {'+' if group == 'experiment' else ''}{group}=" in text
            or len(all_groups()[group]) == 1
        )
    listed = {line.split("=")[0].strip() for line in text.splitlines() if line.startswith("  ")}
    expected = {key.name for key in keys_read(verb)} - NAMES
    assert expected & flat(values_of([])).keys() <= listed  # no other choice's
    assert not (set(all_keys()) - expected) & listed


def test_types_choices_and_defaults_come_from_the_schema_and_the_configuration() -> None:
    text = " ".join(help_text("train", values_of(["gradient=dct", "parallel=hybrid"])).split())
    assert "train.batch_size=128 rows per trainer and step (integer ≥ 1)" in text
    assert "model.embedding_dim=16 columns of each embedding table (integer ≥ 1, ≤ 4096)" in text
    assert "embedding.sharding=table_wise how tables are split over trainers (table_wise |" in text
    assert "gradient=dct: DCT-DP: sends what exceeds a long-lived threshold" in text
    assert "gradient.lifespan=1000 steps after which a threshold is computed again" in text
    assert "gradient.window" not in text
    assert "model.cross" not in text
    text = help_text("train", values_of(["model=dcnv2"]))
    assert "model.cross.rank=128" in text and "model.fm" not in text


@pytest.mark.parametrize(
    "arguments",
    [("train", "-h"), ("train", "train.seed=1", "--help"), ("train", "oops=1", "-h", "x")],
)
def test_help_is_given_wherever_it_is_asked_for(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["dlrm_hybrid", *arguments]) == 0
    assert capsys.readouterr().out.startswith("dlrm_hybrid train: ")


@pytest.mark.parametrize(
    ("command", "shown", "told"),
    [
        (
            "train gradient=dct",
            ["gradient=dct: DCT-DP", "gradient.density=0.01"],
            ["`train` would refuse", "gradient = 'dct': needs a parameter server"],
        ),
        ("prepare data=table", ["data=table: Rows of your own"], []),
        ("train data=table", ["data=table: Rows of your own"], ["data.schema = null:"]),
        ("train -m gradient=dct,topk train.seed=5,6", ["gradient=dct", "train.seed=5"], []),
        (
            "train conf=/nowhere +experiment=mine gradient=topk train.seed=x oops=1 --gpu",
            ["gradient=topk: ", "train.seed=0 "],
            [
                "not applied:",
                "conf = /nowhere: must be a folder",
                "oops: unknown key",
                "--gpu: unknown flag",
                "train.seed = 'x': must be a whole number at least 0 and below 2^63",
            ],
        ),
        ("train ~train.seed optimizer={lr:9}", ["optimizer.lr=9"], ["train.seed: missing"]),
        ("train conf=5 model=[[1]]", ["model=dlrm_paper: "], ["model=[[1]]: no such choice"]),
        ("report threads=2", ["report.runs=null"], ["threads: `report` does not read it"]),
    ],
)
def test_help_shows_what_was_chosen_and_names_what_is_wrong_with_it(
    command: str, shown: list[str], told: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["dlrm_hybrid", *shlex.split(command), "--help"]) == 0
    text = capsys.readouterr().out
    assert max(len(line) for line in text.splitlines()) <= 80
    keys, _, end = text.partition("\nexamples:\n")
    for expected in shown:
        assert expected in " ".join(keys.split())
    for expected in told:
        assert expected in " ".join(end.split())
    assert ("would refuse" in end or "not applied" in end) == bool(told or "-m" in command)


@pytest.mark.parametrize("arguments", [("--version",), ("train", "--version")])
def test_the_version(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["dlrm_hybrid", *arguments]) == 0
    assert capsys.readouterr().out.startswith("dlrm_hybrid 0.")


@pytest.mark.parametrize(
    ("command", "meant"),
    [
        ("train experiment=dct_hybrid", "write +experiment=dct_hybrid"),
        ("train +experiment=dct_level", "did you mean +experiment=dct_levels?"),
        ("train +experiment=[baseline,dct_hybird]", "did you mean +experiment=dct_hybrid?"),
        (
            "train data=criteo",
            "did you mean data=criteo_1tb or data=criteo_1tb_multi_hot or data=criteo_kaggle?",
        ),
        ("train gradient=DCT", "did you mean gradient=dct?"),
        ("train dct_hybird", "did you mean +experiment=dct_hybrid?"),
        ("train --learning-rate 0.1", "did you mean embedding.lr=0.1 or optimizer.lr=0.1?"),
        ("train --batchsize 64", "did you mean train.batch_size=64 or evaluate.batch_size=64?"),
        ("train max_steps=9", "did you mean train.steps=9?"),
        ("train modle=dlrm_small", "did you mean model=dlrm_small?"),
        ("train steps=100", "did you mean train.steps=100?"),
        ("evaluate checkpoint=runs/mine", "did you mean evaluate.checkpoint=runs/mine?"),
        ("export --checkpoint runs/mine", "did you mean export.checkpoint=runs/mine?"),
        ("predict rows='my rows.csv'", "did you mean 'predict.rows=my rows.csv'?"),
        ("train batch_size=64", "batch_size: is a key of train; did you mean train.batch_size=64?"),
        ("train --steps 100", "did you mean train.steps=100?"),
        ("train --steps=100", "did you mean train.steps=100?"),
        ("train --train.steps 100", "did you mean train.steps=100?"),
        ("train --lr 0.1", "did you mean embedding.lr=0.1 or optimizer.lr=0.1?"),
        ("train --batch-size 64", "did you mean train.batch_size=64"),
        ("train --gpu", "unknown flag; choose from -h, --help,"),
        ("train dctt", "did you mean activation=dct or gradient=dct?"),
        ("train dct_hybrid", "did you mean +experiment=dct_hybrid?"),
        ("train runs/mine", "did you mean checkpoint.resume=runs/mine?"),
        ("train optimizer.lr 0.1", "optimizer.lr: is not key=value; did you mean optimizer.lr=0.1"),
        ("train optimizer.lr=0.1,0.2", "several values are a sweep: add -m"),
        ("train +train.seed=1", "write train.seed=1"),
        ("train --resolve", "only apply with --cfg job"),
        (
            "train checkpoint.resume=auto",
            "checkpoint.resume = auto: needs hydra.run.dir=FOLDER, the one to go on in",
        ),
        ("train skip_completed=true", "skip_completed = true: needs hydra.run.dir=FOLDER"),
        (
            "train -m checkpoint.resume=auto train.seed=1,2",
            "checkpoint.resume = auto: needs hydra.sweep.dir=FOLDER",
        ),
        ("train --cfg nope", "nope: is not key=value"),
        ("train --info", "--info: this flag of Hydra's is not supported"),
        ("evaluate runs/mine", "did you mean evaluate.checkpoint=runs/mine?"),
        ("report runs/a", "did you mean report.runs=runs/a?"),
        ("report runs/a runs/b", "did you mean 'report.runs=[runs/a,runs/b]'?"),
        (
            "evaluate runs/a runs/b",
            "did you mean evaluate.checkpoint=runs/a? (evaluate.checkpoint takes one value)",
        ),
        ("prepare a.gz b.gz", "did you mean data=criteo_kaggle 'data.raw=[a.gz,b.gz]'?"),
        ("report 'my runs, é'", """did you mean 'report.runs="my runs, é"'?"""),
        ("train --resume 'my run (1)'", """did you mean 'checkpoint.resume="my run (1)"'?"""),
        ("report report.runs=a,b", "for a list write report.runs=[a,b]"),
        ("prepare train.txt", "did you mean data=criteo_kaggle data.raw=train.txt?"),
        ("doctor keys", "did you mean doctor.action=keys?"),
        (
            "report train.steps=5",
            "train.steps: `report` does not read it; `train`, `import` and `plan` do",
        ),
        (
            "report +experiment=dct_dp",
            "experiment: `report` does not read it; `train` and `plan` do",
        ),
        ("report hydra.run.dir=x", "hydra.run.dir: `report` does not read it; `train` does"),
        ("report data.rows=5", "`export`, `import`, `plan` and `doctor` do"),
    ],
)
def test_a_mistake_is_met_with_the_command_that_was_meant(
    command: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told = faults(capsys, *shlex.split(command))
    assert any(meant in line for line in told), told


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        ("train train.seed=1,2 --cfg job -m", "--cfg: cannot be combined with -m"),
        ("evaluate threads=1,2 -m", "-m: only `train` can be swept, not `evaluate`"),
    ],
)
def test_a_refused_sweep_is_not_asked_to_be_one(
    command: str, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert faults(capsys, *shlex.split(command)) == [fault]


@pytest.mark.parametrize(
    "override",
    [
        f"model.bottom={'[' * 5_000}{']' * 5_000}",
        f"model.bottom={'[' * 5_000}",
        f"model={'{a:' * 3_000}1{'}' * 3_000}",
        f"name={'${' * 3_000}x",
        f"train.seed={'9' * 100_000}",
        f"train.seed=1e{'9' * 400}",
        "name=\x1b[2J",
        "name='\x07\x9b'",
        "name=caf\udce9",
        "\udcff\udcfe=1",
        "--\udcff",
        "\udcff",
        "name=${name}",
        "name=${nope}",
        "name=${oc.decode:${oc.env:HOME}}",
        "=",
        "~",
        "++",
    ],
    ids=lambda text: ascii(text[:24]),
)
def test_whatever_is_typed_is_met_with_one_line(
    override: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = faults(capsys, "train", override)
    assert line.isprintable()
    assert len(line) <= 1_000


def test_the_command_line_of_a_run_serves_other_verbs_and_what_they_do_not_read_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = ("+experiment=dct_dp", "train.steps=5", "data.rows=7000", "hydra.run.dir=runs/mine")
    for verb, text in (
        ("prepare", "not read by `prepare`: +experiment=dct_dp train.steps=5 hydra.run.dir="),
        ("doctor", "not read by `doctor`: +experiment=dct_dp train.steps=5 hydra.run.dir="),
        ("evaluate", "not read by `evaluate`: hydra.run.dir=runs/mine\n"),
        ("train", ""),
    ):
        assert run(["dlrm_hybrid", verb, *line, "--cfg", "job"]) == 0
        told = capsys.readouterr().err
        assert told.startswith(text)
        assert bool(told) == bool(text)
    assert run(["dlrm_hybrid", "train", "report.output=x.html", "--cfg", "job"]) == 0
    assert capsys.readouterr().err == "not read by `train`: report.output=x.html\n"
