"""What keys of the configuration come to: compression, tensors, servers, hosts of a network."""

from pathlib import Path

import pytest

from dlrm_hybrid.config.compose import sweep_of, values_of
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.parallel.dense.pulls import Pulls
from dlrm_hybrid.run.assembly import build

HYBRID = "parallel=hybrid"


@pytest.mark.parametrize(
    ("name", "compressed"),
    [
        ("baseline", ("none", "none", "float32")),
        ("dct_dp", ("dct", "none", "float32")),
        ("dct_mp", ("none", "dct", "float32")),
        ("dct_hybrid", ("dct", "dct", "bfloat16")),
        ("dct_levels", ("dct", "dct", "levels")),
        ("paper_table1", ("none", "dct", "float32")),
        ("paper_table2", ("dct", "none", "float32")),
        ("paper_table3", ("dct", "dct", "float32")),
        ("paper_table6", ("none", "sketch", "float32")),
        ("paper_table7", ("none", "gradient_topk", "float32")),
    ],
)
def test_experiments_compress_what_their_names_say(
    name: str, compressed: tuple[str, str, str]
) -> None:
    config = validate(values_of([f"+experiment={name}"]))
    assert config.name == name
    assert (config.gradient.name, config.activation.name, config.pull.precision) == compressed
    world = "in_process" if name.startswith("paper") else "processes"
    assert (config.parallel.name, config.parallel.world) == ("hybrid", world)


@pytest.mark.parametrize(
    ("sparsity", "bits", "expected"),
    [
        ("0.9", "null", [(0.9, None), (0.9, None)]),
        ("0.9", "4", [(0.9, 4), (0.9, 4)]),
        ("[0.5,0.75]", "[8,4]", [(0.5, 8), (0.75, 4)]),
        ("[0.5,0.75]", "[null,4]", [(0.5, None), (0.75, 4)]),
        ("0.9", "[null,null]", [(0.9, None), (0.9, None)]),
    ],
)
def test_one_number_serves_all_cuts(
    sparsity: str, bits: str, expected: list[tuple[float, int | None]]
) -> None:
    given = (f"activation.sparsity={sparsity}", f"activation.bits={bits}")
    keys = validate(values_of([HYBRID, "activation=dct", *given])).activation
    assert [(keys.sparsity_at(cut), keys.bits_at(cut)) for cut in (0, 1)] == expected
    assert keys.sends_levels == any(one is not None for _, one in expected)


def test_a_sparsity_of_0_is_none() -> None:
    assert [Pulls(sparsity=one).left_out for one in (0, None, 0.5)] == [None, None, 0.5]


@pytest.mark.parametrize(
    ("sparsities", "densities"), [("0.9", [0.1]), ("0.99,.999,0", [0.01, 0.001, 1.0])]
)
def test_a_sparsity_is_read_as_the_density_that_it_leaves(
    sparsities: str, densities: list[float]
) -> None:
    overrides = [HYBRID, "gradient=dct", f"gradient.sparsity={sparsities}"]
    sweep = sweep_of([*overrides, "train.seed=1,2"])
    jobs = map(sweep.job, range(len(sweep.points)))
    found = {job.values["gradient"]["density"] for job in jobs}
    assert found == {*densities}
    if len(densities) == 1:
        assert values_of(overrides)["gradient"]["density"] == densities[0]


def test_an_interaction_alone_takes_settings_of_its_own():
    model = values_of(["model.interaction=cross", "model.cross.rank=7"])["model"]
    assert model["cross"]["rank"] == 7 and "fm" not in model
    assert model["cross"]["layers"] >= 1


@pytest.mark.parametrize(("choice", "servers"), [("served", 1), ("fused", 0)])
def test_as_many_table_servers_as_the_choice_of_tables_needs(choice: str, servers: int) -> None:
    assert values_of([HYBRID, f"embedding={choice}"])["parallel"]["table_servers"] == servers


EMULATED = ("parallel=hybrid", "network=emulated")
SERVED = (*EMULATED, "parallel.cuts=[]", "embedding=served", "parallel.table_servers=3")


def test_the_plan_of_a_network() -> None:
    config = validate(values_of((*EMULATED, "network.rate=2.5gbit", "network.latency=5ms")))
    plan = build.emulation(config)
    assert plan is not None
    assert (plan.hosts, plan.rate_bits_per_second, plan.latency_seconds) == (7, 2.5e9, 0.005)
    assert [build.host(config, rank) for rank in range(7)] == list(range(7))
    assert build.emulation(validate(values_of(("parallel=hybrid",)))) is None


@pytest.mark.parametrize(
    ("overrides", "hosts"),
    [
        ((*SERVED, "parallel.machines=2"), [0, 1, 0, 1, 0]),
        ((*SERVED, "parallel.machines=2", "sync=bounded"), [0, 1, 0, 1, 0, 1, 0]),
        ((*SERVED, "parallel.machines=3", "parallel.servers=1"), [0, 1, 2, 0, 0, 1, 2]),
        ((*EMULATED, "parallel.machines=2"), [0, 0, 0, 1, 1, 1, 0, 1]),
        (
            (*EMULATED, "parallel.machines=2", "parallel.trainers=3"),
            [0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1],
        ),
    ],
)
def test_machines_hold_whole_trainers_and_servers_beside_them(
    overrides: tuple[str, ...], hosts: list[int]
) -> None:
    config = validate(values_of(overrides))
    plan, world = build.emulation(config), build.topology(config)
    assert plan is not None
    assert plan.hosts == max(hosts) + 1
    assert [build.host(config, rank) for rank in range(world.size)] == hosts


def test_no_latency_is_the_network_without() -> None:
    def emulation(latency: str) -> object:
        return build.emulation(validate(values_of((*EMULATED, f"network.latency={latency}"))))

    assert emulation("0ms") == emulation("null") != emulation("1ms")


@pytest.mark.parametrize(
    ("overrides", "servers"),
    [
        ((), 0),
        (("parallel.machines=4",), 0),
        (("parallel.machines=5",), 5),
        (("parallel.machines=2", "parallel.trainers=6"), 2),
        (("gradient=none",), 0),
        (("gradient=none", "parallel.machines=3"), 3),
        (("gradient=cltk",), 2),
        (("gradient.aggregation=leader",), 2),
        (("parallel.cuts=[bottom.2]",), 2),
        (("sync=bounded",), 2),
        (("pull.precision=bfloat16",), 2),
        (("parallel.servers=1",), 1),
    ],
)
def test_few_machines_need_no_servers(overrides: tuple[str, ...], servers: int) -> None:
    words = ["+experiment=dp_levels", "network=emulated", "parallel.machines=2"]
    kept = [word for word in words if word.partition("=")[0] not in " ".join(overrides)]
    config = validate(values_of([*kept, *overrides]))
    assert config.parallel.servers == servers
    assert (config.pull.precision == "float32") == (servers == 0)


@pytest.mark.parametrize("pull", ["{sparsity: 0.9}", "{precision: bfloat16}"])
def test_pulls_in_a_users_own_experiment_keep_their_servers(pull: str, tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    text = f"# @package _global_\ndefaults: [dp_levels]\nparallel: {{machines: 2}}\npull: {pull}\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    config = validate(values_of([f"conf={tmp_path}", "+experiment=mine", "network=emulated"]))
    assert config.parallel.servers == 2
    assert config.pull.sparsity == 0.9 or config.pull.precision == "bfloat16"
