from itertools import product

import pytest

from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.config.keys import as_choice
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.run.assembly import world
from dlrm_hybrid.telemetry.spans import SpanClock
from dlrm_hybrid.types import ConfigError

HYBRID = "parallel=hybrid"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["pull.precision=bfloat16"],
            "pull.precision = 'bfloat16': needs parallel.servers of 1 or more",
        ),
        (
            ["pull.sparsity=0.99"],
            "pull.sparsity = 0.99: needs parallel.servers of 1 or more",
        ),
        (
            [HYBRID, "parallel.trainers=1", "parallel.servers=0", "pull.sparsity=0.99"],
            "pull.sparsity = 0.99: needs parallel.servers of 1 or more",
        ),
        (
            [HYBRID, "gradient=terngrad", "pull.sparsity=0.99"],
            "pull.sparsity = 0.99: gradient.pull=levels moves every weight of every "
            "replica; needs gradient.pull=weights",
        ),
        ([HYBRID, "pull.sparsity=1"], "pull.sparsity = 1: must be a number at least 0 and below 1"),
        (
            ["activation=dct"],
            "activation = 'dct': compresses what stages exchange, and parallel=single has "
            "none; add parallel=hybrid",
        ),
        (["activation.sparsity=0.5"], "activation.sparsity=0.5: only applies to activation=dct, "),
        (
            [HYBRID, "activation=dct", "activation.sparsity=[0.5]"],
            "activation.sparsity = [0.5]: one number, or one for each of "
            "parallel.cuts = [bottom.2, top.2]",
        ),
        (
            [HYBRID, "activation=dct", "activation.observe=0.9"],
            "activation.observe=0.9: only applies to activation=none",
        ),
        (["activation.observe=0.9"], "activation.observe = 0.9: needs parallel.cuts"),
        (
            [HYBRID, "activation=sketch", "activation.bits=4"],
            "activation.bits=4: only applies to activation=dct",
        ),
        (
            [HYBRID, "activation=dct", "activation.bits=2"],
            "activation.bits = 2: must be a whole number at least 3 and at most 8 or a list",
        ),
        (
            [HYBRID, "activation=dct", "activation.bits=[8,9]"],
            "activation.bits[1] = 9: must be a whole number at least 3 and at most 8 or null",
        ),
        (
            [HYBRID, "activation=dct", "activation.bits=[null,4,4]"],
            "activation.bits = [null, 4, 4]: one number, or one for each of "
            "parallel.cuts = [bottom.2, top.2]",
        ),
        (
            [HYBRID, "activation=sketch", "activation.precision=float16"],
            "activation.precision=float16: only applies to activation=dct",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        values_of(overrides)
    assert message in str(caught.value)


def test_a_wrong_item_of_a_list_is_told_once() -> None:
    with pytest.raises(ConfigError) as caught:
        values_of(
            [HYBRID, "activation=dct", "activation.bits=[4,9]", "activation.sparsity=[0.5,2]"]
        )
    assert sorted(str(caught.value).splitlines()) == [
        "  activation.bits[1] = 9: must be a whole number at least 3 and at most 8 or null",
        "  activation.sparsity[1] = 2: must be a number at least 0 and below 1",
        "configuration: 2 faults",
    ]


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


@pytest.mark.parametrize(
    ("precision", "gradient", "optimizer"),
    [
        *product(
            ("float32", "bfloat16", "float16", "levels"),
            ("none", "dct", "deft", "randomk"),
            ("sgd", "adam"),
        )
    ],
)
def test_a_sparsity_of_0_is_none(
    precision: str, gradient: str, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers are the same, and so bits are."""
    monkeypatch.setattr(world, "ParameterServer", lambda *given: given[4].bucket)
    values = values_of([HYBRID])
    chosen = {"gradient": gradient, "optimizer": optimizer}
    values |= {section: as_choice(section, name) for section, name in chosen.items()}
    configs = [
        validate({**values, "pull": {"precision": precision, "sparsity": one}}) for one in (0, None)
    ]
    layouts = [world.layout(one, (5,) * 26, 10, 0) for one in configs]
    pairs = list(zip(configs, layouts, strict=True))
    without, unset = (world.server(*pair, 0, SpanClock()) for pair in pairs)
    assert without == unset
