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

ASYNC = ("parallel=hybrid", "sync=async", "embedding=served", "parallel.table_servers=1")


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


@pytest.mark.parametrize(
    "choice",
    [
        "data=criteo_kaggle",
        "model=dlrm_small",
        "optimizer=momentum",
        "optimizer=adagrad",
        "embedding.optimizer=rowwise_adagrad",
        "precision=bfloat16",
        "data.raw=[a,b,c,d,e,f,g] data=criteo_kaggle data.day_split=files",
    ],
)
def test_every_choice_holds(choice: str) -> None:
    values_of(choice.split())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lrr=1", "optimizer.lrr: unknown key; did you mean optimizer.lr=1?"),
        ("+optimizer.lrr=1", "optimizer.lrr: unknown key; did you mean optimizer.lr=1?"),
        (
            "learning_rate=1",
            "learning_rate: unknown key; did you mean embedding.lr=1 or optimizer.lr=1?",
        ),
        (
            "optimizer.learning_rate=1",
            "optimizer.learning_rate: unknown key; did you mean optimizer.lr=1?",
        ),
        ("optimizer.lr=fast", "optimizer.lr = 'fast': must be a number above 0 and at most 1e+18"),
        ("optimizer.lr=-1", "optimizer.lr = -1: must be a number above 0 and at most 1e+18"),
        ("optimizer.lr=inf", "optimizer.lr = inf: must be a number above 0 and at most 1e+18"),
        (
            "train.batch_size=1.5",
            "train.batch_size = 1.5: must be a whole number at least 1 and at most 1,048,576",
        ),
        *(
            (
                f"{key}={10**30 - 1}",
                f"{key} = {10**30 - 1}: must be a whole number at least {bound}",
            )
            for key, bound in (
                ("train.steps", "1 and below 2^63 or null"),
                ("train.epochs", "1 and below 2^63"),
                ("checkpoint.every", "0 and below 2^63"),
            )
        ),
        ("train.seed=1e17", "train.seed = 1e+17: must be a whole number at least 0 and below 2^63"),
        (
            "embedding.eps=1e-320",
            "embedding.eps = 1e-320: must be a number at least 1.17549e-38 and at most 3.40282e+38",
        ),
        (
            "train.batch_size=null",
            "train.batch_size = null: must be a whole number at least 1 and at most 1,048,576",
        ),
        ("~train.seed", "train.seed: missing"),
        (
            "train=5",
            "train=5: train is a section; its keys: train.batch_size, train.epochs, train.steps, "
            "train.seed, train.evaluate_every, train.patience, train.min_delta, train.monitor",
        ),
        ("precision=float64", "precision = 'float64': must be 'float32' or 'bfloat16'"),
        (
            "gradient.name=dct",
            "gradient.name=dct: sets only the name; gradient=dct selects the choice with all its "
            "keys",
        ),
        (
            "model=huge",
            "model=huge: no such choice; choose from dcnv2, deepfm, dlrm_paper, dlrm_small",
        ),
        (
            "+experiment=nope",
            "+experiment=nope: no such choice; choose from bars_avazu_x1, "
            "bars_criteo_x1, bars_criteo_x4, baseline, data_parallel, dct_dp, dct_hybrid, "
            "dct_levels, dct_mp, dp_bfloat16, dp_levels, methods, mlperf_v2, paper_table1, "
            "paper_table2, paper_table3, paper_table6, paper_table7",
        ),
        ("train.steps=[1,", "train.steps=[1,: cannot be parsed as key=value"),
        ("model=1", "model=1: no such choice; choose from dcnv2, deepfm, dlrm_paper, dlrm_small"),
        ("+@ata.raw=[]", "+@ata.raw=[]: the keys of a group cannot be moved with @"),
        (
            "model=[[1]]",
            "model=[[1]]: no such choice; choose from dcnv2, deepfm, dlrm_paper, dlrm_small",
        ),
        ("train.seed=a\nb", "train.seed=a\\nb: cannot be parsed as key=value"),
        ("name=\x1b[31m\0", "name=\\x1b[31m\\x00: cannot be parsed as key=value"),
        (
            "name='\u202e'",
            "name = '\\u202e': must be letters, digits and . _ - only, and begin with a letter or "
            "digit",
        ),
        ("report.output=x.md", "report.output = 'x.md': must be a file whose name ends in .html"),
        (
            "model.bottom=[13,x]",
            "model.bottom[1] = 'x': must be a whole number at least 1 and below 2^63",
        ),
        ("train={steps: 5, stepz: 1}", "train.stepz: unknown key; did you mean train.steps?"),
        ("optimizer={lrr: 1}", "optimizer.lrr: unknown key; did you mean optimizer.lr?"),
        ("hydra.run.dir=", "hydra.run.dir = : must be a path"),
        ("hydra.run.dir=1_0", "hydra.run.dir = 10: is read as a number; write hydra.run.dir=./1_0"),
        (
            "hydra.run.dir='???'",
            "hydra.run.dir = ???: is read as a missing value; write hydra.run.dir=./???",
        ),
        (
            "model.embedding_dim=0",
            "model.embedding_dim = 0: must be a whole number at least 1 and at most 4,096",
        ),
        (
            "model.bottom=[12,16]",
            "model.bottom[0] = 12: must be 13, the integer features",
        ),
        (
            "model.embedding_dim=8",
            "model.bottom[4] = 16: must equal model.embedding_dim = 8, both feed the interaction",
        ),
        (
            "optimizer.momentum=0.9",
            "optimizer.momentum=0.9: only applies to optimizer=momentum",
        ),
        (
            "optimizer.warmup_steps=9",
            "optimizer.warmup_steps = 9: only applies to optimizer.schedule=warmup_decay, "
            "not constant",
        ),
        (
            "data.raw=x",
            "data.raw=x: only applies to data=criteo_kaggle, criteo_1tb, criteo_1tb_multi_hot or "
            "table",
        ),
    ],
)
def test_one_fault_names_its_key(override: str, message: str) -> None:
    assert faults(override) == [message]


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


@pytest.mark.parametrize("digits", [400, 5_000])
def test_a_long_value_is_told_shortened(digits: int) -> None:
    (line,) = faults(f"train.seed={'9' * digits}")
    assert line.startswith("train.seed")
    assert len(line) <= 501


def test_faults_of_all_kinds_are_told_together() -> None:
    found = faults("optimizer.lrr=1", "model=huge", "train.batch_size=0", "precision=no")
    assert [line.partition(":")[0] for line in found] == [
        "optimizer.lrr",
        "model=huge",
        "precision = 'no'",
        "train.batch_size = 0",
    ]


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


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["parallel.trainers=2"],
            "parallel.trainers=2: only applies to parallel=hybrid",
        ),
        (
            ["parallel.cuts=[top.1]"],
            "parallel.cuts=[top.1]: only applies to parallel=hybrid",
        ),
        (
            ["parallel=hybrid", "parallel.servers=0"],
            "parallel.servers = 0: parallel.trainers = 2 need at least one server; "
            "only a single trainer works without",
        ),
        (
            ["parallel=hybrid", "parallel.cuts=[bottom.5]"],
            "parallel.cuts = [bottom.5]: no layer bottom.5 to cut after; choose from "
            "bottom.1, bottom.2, bottom.3, bottom.4, top.1, top.2, top.3",
        ),
        (
            ["parallel=hybrid", "parallel.cuts=[top.1,bottom.2]"],
            "parallel.cuts = [top.1, bottom.2]: name each cut once, in the order of the layers",
        ),
        (
            ["parallel=hybrid", "parallel.servers=17"],
            "parallel.servers = 17: the model has only 16 dense tensors to own",
        ),
        (
            ["parallel=hybrid", "schedule.microbatches=3"],
            "schedule.microbatches = 3: must divide train.batch_size = 128",
        ),
        (["sync.staleness=2"], "sync.staleness=2: only applies to sync=bounded"),
        (["sync=bounded"], "sync = bounded: needs parallel.servers of 1 or more"),
        (["sync=async"], "sync = async: needs parallel.servers of 1 or more"),
        (
            ["parallel=hybrid", "sync.lr_scale=one"],
            "sync.lr_scale=one: only applies to sync=async",
        ),
        (
            ["parallel=hybrid", "sync.ahead=8"],
            "sync.ahead=8: only applies to sync=async",
        ),
        (
            ["parallel=hybrid", "sync.in_flight=2"],
            "sync.in_flight=2: only applies to sync=async",
        ),
        (
            [*ASYNC, "sync.in_flight=65"],
            "sync.in_flight = 65: must be a whole number at least 1 and at most 64",
        ),
        (
            [*ASYNC, "parallel.threads=2", "activation=dct", "activation.bits=4"],
            "activation.bits = 4: threads of one worker (parallel.threads = 2) send in no order, "
            "and tables come with what they code",
        ),
        (
            [*ASYNC, "parallel.threads=2", "sync.in_flight=2"],
            "parallel.threads = 2: others compute while one waits already; needs sync.in_flight=1",
        ),
        (
            [*ASYNC, "sync.ahead=0"],
            "sync.ahead = 0: must be a whole number at least 1 and below 2^63 or null",
        ),
        ([*ASYNC, "sync.lr_scale=null"], "sync.lr_scale = null: must be 'trainers' or 'one'"),
        (
            ["parallel=hybrid", "sync=async"],
            "embedding = 'fused': trainers that share tables wait for each other; sync=async needs "
            "embedding=served",
        ),
        (
            ["parallel=hybrid", "parallel.trainers=1", "parallel.elastic=true"],
            "embedding = 'fused': a trainer that is lost would take its tables along; "
            "parallel.elastic=true needs embedding=served",
        ),
        (
            [*ASYNC, "optimizer=momentum"],
            "optimizer = 'momentum': moves all weights with every push, so each answer would hold "
            "all of them; sync=async needs sgd, adagrad or adam",
        ),
        (
            [*ASYNC, "pull.sparsity=0.9"],
            "pull.sparsity = 0.9: all trainers must be sent the same, and with sync=async each is "
            "sent its own",
        ),
        (
            [*ASYNC, "sync.record=true", "parallel.world=in_process"],
            "sync.record = True: parallel.world=in_process has an order of its own",
        ),
        (
            [*ASYNC, "parallel.elastic=true", "parallel.world=in_process"],
            "parallel.elastic = True: parallel.world=in_process has no processes to lose",
        ),
        (
            [*ASYNC, "parallel.elastic=true", "sync.record=true"],
            "parallel.elastic = True: a run that goes on without a trainer cannot be played back; "
            "needs sync.record=false",
        ),
        (
            ["parallel=hybrid", "parallel.threads=2"],
            "parallel.threads = 2: only applies to sync=async, not sync",
        ),
        (
            [*ASYNC, "parallel.threads=0"],
            "parallel.threads = 0: must be a whole number at least 1 and at most 1,024",
        ),
        (
            [*ASYNC, "parallel.threads=2", "parallel.world=in_process"],
            "parallel.threads = 2: parallel.world=in_process lets workers take turns in one thread",
        ),
        (
            [*ASYNC, "parallel.threads=2", "sync.ahead=7"],
            "parallel.threads = 2: leases are a quarter of sync.ahead = 7, less than a batch for "
            "each thread; needs 8 or more",
        ),
        (
            [*ASYNC, "parallel.threads=2", "sync.record=true"],
            "parallel.threads = 2: threads read weights while answers change them, which no order "
            "of messages tells; needs sync.record=false",
        ),
        (
            ["parallel=hybrid", "sync=async", "parallel.trainers=1", "parallel.threads=2"],
            "parallel.threads = 2: threads cannot share tables of their own; needs "
            "embedding=served",
        ),
        (
            [*ASYNC, "parallel.threads=2", "embedding.staleness=3"],
            "parallel.threads = 2: while one thread waits for rows others compute; needs "
            "embedding.staleness=0",
        ),
        (
            [*ASYNC, "parallel.threads=2", "activation=gradient_topk", "activation.sparsity=0.9"],
            "parallel.threads = 2: activation=gradient_topk has one residual for each row",
        ),
        (
            ["parallel=hybrid", "parallel.elastic=true"],
            "embedding = 'fused': trainers that share tables wait for each other; "
            "parallel.elastic=true needs embedding=served",
        ),
        (
            [*ASYNC, "sync=bounded", "sync.staleness=1", "parallel.elastic=true"],
            "parallel.elastic = True: needs sync=sync or async, not bounded",
        ),
        (
            [*ASYNC, "sync=sync", "parallel.elastic=true", "pull.sparsity=0.9"],
            "pull.sparsity = 0.9: all trainers must be sent the same, and with "
            "parallel.elastic=true each is sent its own",
        ),
        (
            [*ASYNC, "sync.replay=runs/1"],
            "sync.replay = 'runs/1': the recorded order is played back by "
            "parallel.world=in_process, not processes",
        ),
        (
            ["embedding.sharding=row_wise"],
            "embedding.sharding = 'row_wise': needs parallel.trainers of 2 or more",
        ),
        (
            ["parallel=hybrid", "parallel.world=in_process", "embedding.sharding=row_wise"],
            "embedding.sharding = 'row_wise': parallel.world=in_process has one set of tables",
        ),
        (
            [
                "parallel=hybrid",
                "embedding.sharding=column_wise",
                "embedding.optimizer=rowwise_adagrad",
            ],
            "embedding.sharding = 'column_wise': embedding.optimizer=rowwise_adagrad keeps one "
            "accumulator per full row",
        ),
        (
            [
                "parallel=hybrid",
                "embedding.sharding=column_wise",
                "model.embedding_dim=4",
                "model.bottom=[13,512,256,64,4]",
            ],
            "embedding.sharding = 'column_wise': model.embedding_dim = 4 cannot be cut: "
            "FBGEMM needs columns in multiples of 4",
        ),
        (
            [
                *("parallel=hybrid", "parallel.trainers=2", "embedding.sharding=column_wise"),
                *("parallel.servers=1", "model.embedding_dim=10", "model.bottom=[13,10]"),
                "parallel.cuts=[]",
            ],
            "embedding.sharding = 'column_wise': model.embedding_dim = 10 cannot be cut: "
            "FBGEMM needs columns in multiples of 4",
        ),
        (
            ["embedding.comm_precision=bfloat16"],
            "embedding.comm_precision = 'bfloat16': only applies to parallel=hybrid, not single",
        ),
        (
            ["embedding.deduplicate=true"],
            "embedding.deduplicate = True: only applies to parallel=hybrid, not single",
        ),
        *(
            (
                ["parallel=hybrid", "embedding.deduplicate=true", f"embedding.sharding={sharding}"],
                "embedding.deduplicate = True: needs embedding.sharding=table_wise, "
                f"not {sharding}",
            )
            for sharding in ("row_wise", "column_wise", "auto")
        ),
        (
            ["network.bind=10.0.0.1"],
            "network.bind = '10.0.0.1': needs network.keys, a file of CURVE keys",
        ),
    ],
)
def test_impossible_layouts_are_refused_with_the_reason(overrides: list[str], message: str) -> None:
    assert faults(*overrides) == [message]


@pytest.mark.parametrize(
    "choice",
    [
        "parallel=hybrid",
        "+experiment=baseline",
        "parallel=hybrid sync=bounded sync.staleness=3",
        "+experiment=dct_hybrid sync=async embedding=served parallel.table_servers=1",
        "parallel=hybrid parallel.trainers=1 sync=async",
        "parallel=hybrid parallel.trainers=1 parallel.servers=0 parallel.cuts=[bottom.4,top.1]",
        "parallel=hybrid schedule=one_f_one_b schedule.microbatches=4",
        "parallel=hybrid embedding.sharding=row_wise embedding.comm_precision=bfloat16",
        "parallel=hybrid embedding.deduplicate=true",
        "+experiment=dct_hybrid parallel.trainers=1",
        "+experiment=dct_hybrid parallel.trainers=1 parallel.world=in_process",
    ],
)
def test_every_layout_holds(choice: str) -> None:
    values_of(choice.split())
