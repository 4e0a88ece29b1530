"""What compressors on a device select, keep and remember: the same as those on the CPU.

Here plain torch stands for a device, on tensors of the CPU, and Triton's kernels are interpreted
where TRITON_INTERPRET=1 is set and Triton is there. With a GPU both run on it, as
scripts/gpu/check.sh does.
"""

import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec, module_from_spec
from itertools import accumulate, cycle, islice

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from dlrm_hybrid.compress import (
    CltK,
    Dct,
    Deft,
    Dgc,
    Gaussian,
    GradientMethod,
    Hard,
    RandomK,
    RedSync,
    Sidco,
    TopK,
    decode,
    host,
)
from dlrm_hybrid.compress.device import residual, shard, sums
from dlrm_hybrid.compress.device.feedback import DeviceFeedback, DeviceSent, can_move
from dlrm_hybrid.compress.device.ops import DeviceOps, Ranks
from dlrm_hybrid.compress.device.plain import PlainOps
from dlrm_hybrid.compress.device.shard import Selection, addresses
from dlrm_hybrid.compress.device.sums import Blocks, Sums, sent
from dlrm_hybrid.compress.gradient.collective import encode_together
from dlrm_hybrid.compress.gradient.compressor import Compressor
from dlrm_hybrid.compress.gradient.context import StageContext
from dlrm_hybrid.compress.gradient.error_feedback import ErrorFeedback
from dlrm_hybrid.compress.gradient.layout import Layout, Spec
from dlrm_hybrid.compress.library import compressor as library
from dlrm_hybrid.types import DivergedError

CPU = torch.device("cpu")
CPUS = [torch.device("cpu", 0), torch.device("cpu", 1)]  # they differ in name only
HAS_GPU = torch.cuda.is_available()
INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
SIZES = (
    ((130, 100), (37,), (1,), (0, 3), (9001,)) if not INTERPRETS else ((9, 30), (7,), (0,), (1,))
)
SPECS = [Spec(index, f"tensor{index}", shape) for index, shape in enumerate(SIZES)]
LAYOUT = Layout(SPECS)
STEPS = 4 if INTERPRETS else 14
METHODS: list[GradientMethod] = [
    Dct(density=0.01),
    Dct(density=0.05, lifespan=3, renewal="fixed", staggered=True, precision="bfloat16"),
    TopK(density=0.02),
    TopK(density=0.02, precision="float16"),
    Sidco(density=0.01, window=2),
    Sidco(density=0.01, distribution="pareto"),
    Sidco(density=0.002, adaptation="literal"),
    Sidco(density=0.002, adaptation=3),
    Dgc(density=0.01, warmup_steps=2),
    Dgc(density=0.01, warmup_steps=0, nesterov=True, lowest=1.0, highest=1.0),
    Gaussian(density=0.01),
    Gaussian(density=0.01, fit="magnitude"),
    RedSync(density=0.01),
    RedSync(density=0.01, search="trim"),
    Hard(density=0.01),
]
HANDED_OVER: list[GradientMethod] = [  # whose steps read more than numbers
    Dct(density=0.02, precision="levels"),
    Dgc(density=0.02, warmup_steps=1, precision="levels"),
    CltK(density=0.02, low_pass=0.5, precision="levels"),
    CltK(density=0.02),
    CltK(density=0.02, low_pass=0.5, precision="float16"),
    Deft(density=0.02),
    Deft(density=0.02, budget="paper", precision="bfloat16"),
    Dct(density=0.02, aggregation="leader", precision="bfloat16"),
    TopK(density=0.02, aggregation="union"),
    Dgc(density=0.02, warmup_steps=1, aggregation="union", precision="float16"),
    RandomK(density=0.02),  # as if trainers had agreed
]
# In test_device_ranks.py each kind of method computes on one device and on two.
ONE_DEVICE = partial(pytest.param, marks=pytest.mark.slow)
ALL_METHODS = pytest.mark.parametrize("method", [*METHODS, *HANDED_OVER], ids=repr)
OWN_METHODS = pytest.mark.parametrize("method", METHODS, ids=repr)


def triton(blocks: Blocks) -> DeviceOps:
    from dlrm_hybrid.compress.device.launches import TritonOps

    return TritonOps(Blocks(blocks.counts, blocks.device, 64) if INTERPRETS else blocks)


NO_TRITON = pytest.mark.skipif(
    not (find_spec("triton") and (HAS_GPU or INTERPRETS)),
    reason="Triton's kernels need a GPU, or TRITON_INTERPRET=1",
)
NO_GPU = pytest.mark.skipif(not HAS_GPU or INTERPRETS, reason="there is no GPU")
PLACES = [
    pytest.param(
        triton, CPU if INTERPRETS else torch.device("cuda", 0), marks=NO_TRITON, id="triton"
    ),
    pytest.param(PlainOps, torch.device("cuda", 0), marks=NO_GPU, id="plain"),
]
ALL_PLACES = pytest.mark.parametrize(("ops", "device"), PLACES)
Operations = Callable[[Blocks], DeviceOps]


def original(method: GradientMethod, layout: Layout = LAYOUT) -> ErrorFeedback:
    context = StageContext(
        layout=layout,
        trainer=0,
        trainers=1,
        model_elements=layout.size,
        last_layer=None,
        lr=lambda step: 1.0,
        seed=3,
    )
    made = method.build(context)
    assert can_move(made) and isinstance(made, ErrorFeedback)
    return made


def gradients_of(step: int, layout: Layout = LAYOUT) -> dict[str, Tensor]:
    """Heavy tails; every fourth step with many equal values, every fifth much smaller."""
    drawn = torch.Generator().manual_seed(step)
    made = {spec.name: torch.randn(spec.shape, generator=drawn) ** 3 for spec in layout.specs}
    if step % 4 == 3:
        made["tensor0"] = made["tensor0"].round()
    return {name: one if step % 5 else one / 8 for name, one in made.items()}


def feedback(
    method: GradientMethod, devices: Sequence[torch.device], ops: Operations
) -> DeviceFeedback:
    """Compresses on devices, which have the tensors in turn."""
    return DeviceFeedback(original(method), [*islice(cycle(devices), len(SIZES))], ops)


def selection(compressor: DeviceFeedback, gradients: dict[str, Tensor], step: int) -> Selection:
    """What a step has selected, on the first device."""
    pairs = zip(gradients.values(), compressor.homes, strict=True)
    given = [one.to(home, copy=True) for one, home in pairs]
    (sent,) = encode_together([compressor.encode_in_place(given, step)], step, LAYOUT.size)
    assert isinstance(sent, DeviceSent)
    return sent.selections[0]


def held(compressor: Compressor) -> dict[str, Tensor]:
    return {name: one.cpu().nan_to_num(-1) for name, one in compressor.tensors().items()}


@pytest.mark.parametrize("devices", [ONE_DEVICE(1), 2])
@ALL_METHODS
def test_plain_torch_sends_and_keeps_what_the_cpu_does(
    method: GradientMethod, devices: int
) -> None:
    cpu, device = original(method), feedback(method, CPUS[:devices], PlainOps)
    for step in range(STEPS):
        gradients = gradients_of(step)
        pair = [
            encode_together([one.encode(gradients, step)], step, LAYOUT.size)[0].sections()
            for one in (cpu, device)
        ]
        assert [bytes(one.payload) for one in pair[0].values()] == [
            bytes(one.payload) for one in pair[1].values()
        ]
        states = held(cpu), held(device)
        assert states[0].keys() == states[1].keys()
        for name, one in states[0].items():
            assert torch.equal(one, states[1][name]), f"{name} in step {step}"
    assert cpu.report() == device.report()


@ALL_METHODS
@ALL_PLACES
def test_every_place_sends_and_keeps_the_same(
    method: GradientMethod, ops: Operations, device: torch.device
) -> None:
    plain = feedback(method, [CPU], PlainOps)
    there = feedback(method, [device], ops)
    for step in range(STEPS):
        gradients = gradients_of(step)
        own, other = selection(plain, gradients, step), selection(there, gradients, step)
        assert torch.equal(own.indices_K, other.indices_K.cpu())
        assert torch.equal(own.values_K, other.values_K.cpu())
        states = held(plain), held(there)
        for name, one in states[0].items():
            # Sums have another order: their last bit may differ, a threshold's with it.
            torch.testing.assert_close(one, states[1][name], rtol=1e-6, atol=0)
            if name.endswith((".residual", ".momentum")):
                assert torch.equal(one, states[1][name])


@pytest.mark.parametrize(
    ("method", "is_there"),
    [
        (Dct(precision="levels"), True),
        (Dct(drain="flush"), False),
        (Sidco(distribution="gamma"), False),
    ],
    ids=repr,
)
def test_a_method_that_copies_all_gradients_to_the_cpu_says_so(
    method: GradientMethod,
    is_there: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(library, "homes_of", lambda parameters: [CPU] * len(parameters))
    compressor = method.for_parameters([("own", nn.Parameter(torch.zeros(100)))])
    for step in range(2):
        compressor.encode([torch.ones(100)], step)
    said = [] if is_there else [f"{method!r} computes on the CPU: all gradients go there and back"]
    assert [text.removesuffix(" in each step") for text in caplog.messages] == said


# Of an element that is sent: bytes from the device, and to it.
CROSSING: list[tuple[GradientMethod, int, int]] = [
    (TopK(density=0.01), 8, 0),
    (TopK(density=0.01, precision="bfloat16"), 8, 0),
    (TopK(density=0.01, precision="levels"), 8, 8),
    (TopK(density=0.01, aggregation="leader"), 16, 4),
    (TopK(density=0.01, aggregation="union"), 16, 4),
    (CltK(density=0.01), 16, 4),
    (Deft(density=0.01), 16, 4),
    (RandomK(density=0.01), 16, 8),
]


@pytest.mark.parametrize(
    ("method", "down", "up"), CROSSING, ids=lambda one: getattr(one, "name", None)
)
def test_only_what_was_selected_crosses(
    method: GradientMethod, down: int, up: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As docs say, of a trainer that hands over what it sends; beside some numbers of a tensor."""
    crossed = {"down": 0, "up": 0}
    fetched, to_device = residual.fetched, residual.uploaded

    def counted_down(tensors: Sequence[Tensor]) -> list[Tensor]:
        crossed["down"] += sum(one.nbytes for one in tensors)
        return fetched(tensors)

    def counted_up(array_K: np.ndarray, device: torch.device) -> Tensor:
        crossed["up"] += array_K.nbytes
        return to_device(array_K, device)

    for module in (host, residual):
        monkeypatch.setattr(module, "fetched", counted_down)
    monkeypatch.setattr(residual, "uploaded", counted_up)
    layout = Layout([Spec(0, "tensor0", (200_000,))])
    compressor = DeviceFeedback(original(method, layout), [CPU], PlainOps)
    for step in range(3):
        crossed.update(down=0, up=0)
        encoding = compressor.encode(gradients_of(1, layout), step)
        encode_together([encoding], step, layout.size)[0].elements()
        assert crossed["up"] == 2000 * up
        assert 0 <= crossed["down"] - 2000 * down < 100


EDGES = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-40, 1.5, -1.5, 1.5, 3e38, -2.0, 0.5, 1.5])


@pytest.mark.parametrize("tau", [0.0, 1e-45, 2e-45, 1e-40, 1.5, 3e38])
@ALL_PLACES
def test_every_place_selects_the_smallest_numbers_and_no_zeros(
    ops: Operations, device: torch.device, tau: float
) -> None:
    blocks = Blocks([EDGES.numel()], device)
    x, made = Sums(blocks), ops(blocks)
    given = [EDGES.to(device, copy=True)]
    x.begin(given, addresses(given, device))
    taus_T = sent([tau], torch.float32, device)
    marks = made.mark(x, taus_T, given, x.addresses_T)
    moved = given[0].clone()
    count = int(marks.splits_E[-1])
    indices_K, values_K = made.compact(marks, count, given, x.addresses_T)
    reach = (EDGES.abs() >= taus_T.cpu()) & (EDGES != 0)
    assert torch.equal(indices_K.cpu(), reach.nonzero().view(-1).int())
    assert torch.equal(values_K.cpu(), EDGES[reach])
    assert torch.equal(x.residual_N.cpu()[: EDGES.numel()], EDGES.masked_fill(reach, 0))
    assert torch.equal(moved.cpu(), EDGES.masked_fill(~reach, 0))
    assert not given[0].any()


@pytest.mark.parametrize("k", [1, 2, 5, 10, 12])
@ALL_PLACES
def test_every_rank_is_found_among_equal_and_tiny_numbers(
    ops: Operations, device: torch.device, k: int
) -> None:
    blocks = Blocks([EDGES.numel(), 3], device)
    x, made = Sums(blocks), ops(blocks)
    given = [EDGES.to(device), torch.ones(3, device=device)]
    x.begin(given, addresses(given, device))
    taus_T = made.kth(x, Ranks(blocks, [k, 3]), sent([1, 1], torch.bool, device))
    expected = EDGES.abs().sort(descending=True).values[k - 1]
    assert taus_T.tolist() == [expected.item(), 1.0]


@ALL_PLACES
def test_a_rank_is_found_where_the_sample_deceives(ops: Operations, device: torch.device) -> None:
    count = 61 * 200
    values = torch.zeros(count)
    values[::61] = 8.0  # all that is sampled, and nothing else
    values[1::61] = torch.linspace(1, 2, 200)
    blocks = Blocks([count], device)
    x, made = Sums(blocks), ops(blocks)
    given = [values.to(device)]
    x.begin(given, addresses(given, device))
    taus_T = made.kth(x, Ranks(blocks, [399]), sent([1], torch.bool, device))
    assert taus_T.tolist() == [values.sort(descending=True).values[398].item()]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("method", [Dct(), Sidco(), Dgc()], ids=lambda one: one.name)
@pytest.mark.parametrize(
    ("ops", "device"), [pytest.param(PlainOps, None, id="plain on two devices"), *PLACES]
)
def test_what_is_not_finite_changes_nothing(
    method: GradientMethod, ops: Operations, device: torch.device | None, bad: float
) -> None:
    compressor = feedback(method, [device] if device else CPUS, ops)
    selection(compressor, gradients_of(1), 0)
    before = held(compressor)
    broken = gradients_of(2)
    broken["tensor1"][3] = bad
    with pytest.raises(DivergedError, match="step 2: the gradient of tensor1 is not finite"):
        selection(compressor, broken, 1)
    for name, one in held(compressor).items():
        if name.endswith((".residual", ".momentum")):
            assert torch.equal(one, before[name])


@pytest.mark.parametrize(
    ("ops", "device"), [pytest.param(PlainOps, CPU, id="plain on the CPU"), *PLACES]
)
def test_what_finds_no_room_is_listed_all_the_same(
    ops: Operations, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    roomy = feedback(TopK(density=0.5), [device], ops)
    narrow = feedback(TopK(density=0.5), [device], ops)
    made: list[tuple[Selection, list[Tensor]]] = []
    for compressor, room in ((roomy, 10_000), (narrow, 3)):
        monkeypatch.setattr(shard, "_ROOM", room)
        monkeypatch.setattr(shard, "_ROOMY", 0)
        given = [one.to(device, copy=True) for one in gradients_of(3).values()]
        numbers = [one.tolist() for one in compressor.launch(given, 0)]
        made.append((compressor.finish(numbers).selections[0], given))
    (own, left), (other, others_left) = made
    assert own.indices_K.numel() > 100
    assert all(torch.equal(*pair) for pair in zip(own, other, strict=True))
    assert all(torch.equal(*pair) for pair in zip(left, others_left, strict=True))
    assert not any(one.any() for one in left)


@ALL_PLACES
def test_what_was_not_delivered_returns(ops: Operations, device: torch.device) -> None:
    compressor = feedback(TopK(density=0.5), [device], ops)
    gradients = gradients_of(1)
    compressor.residual.put_back([selection(compressor, gradients, 0)])
    for name, one in gradients.items():
        assert torch.equal(one, compressor.tensors()[f"{name}.residual"].cpu())


@pytest.fixture
def waits() -> Iterator[list[object]]:
    """The times that torch makes the host wait for the GPU."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        yield caught
        torch.cuda.set_sync_debug_mode("default")


# Of an element: what an operation reads and writes, and what joins the residual in the first look.
BYTES = {
    "inspect": 4,
    "moments": 4,
    "excesses": 4,
    "looks": 4,
    "kth": 3 * 4,
    "mark": 8,
    "blend": 12,
}
JOINING = 8  # gradient read, sum written
PASSES: list[tuple[GradientMethod, set[int]]] = [
    (Dct(density=0.01), {20, 32}),  # 32 in a step that renews its threshold
    (TopK(density=0.01), {32}),
    (Sidco(density=0.01), {36, 40}),  # 28, and 4 for each stage but the first
    (Dgc(density=0.01, warmup_steps=0), {40, 52}),  # 52 where too many reach the sample's threshold
    (Gaussian(density=0.01), {28}),
    (RedSync(density=0.01), {28}),
]


@pytest.mark.parametrize(("method", "expected"), PASSES, ids=lambda one: getattr(one, "name", None))
def test_a_step_reads_and_writes_as_many_bytes_as_docs_say(
    method: GradientMethod, expected: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an element, in steps after thresholds have settled; sparse accesses are left out."""
    layout, moved = Layout([Spec(0, "tensor0", (200_000,))]), list[int]()

    def counted(name: str) -> Callable[..., object]:
        operation = getattr(PlainOps, name)

        def run(ops: PlainOps, x: Sums, *arguments: object) -> object:
            looks = name not in ("inspect", "blend")
            # Only the k-th magnitude of what is due, and only thresholds of some tensor.
            is_active = name not in ("excesses", "looks", "kth") or bool(arguments[1].any())
            if x.blocks.counts == [layout.size]:  # not of a sample
                moved[-1] += BYTES[name] * is_active + JOINING * (looks and x.waits)
            return operation(ops, x, *arguments)

        return run

    for name in BYTES:
        monkeypatch.setattr(PlainOps, name, counted(name))
    compressor = DeviceFeedback(original(method, layout), [CPU], PlainOps)
    for step in range(30):
        moved.append(0)
        selection(compressor, gradients_of((1, 2, 6)[step % 3], layout), step)
    assert {*moved[12:]} <= expected and min(expected) in moved[12:]


class Unlaunched:
    """Triton's kernels, none of which is launched."""

    def __getattr__(self, name: str) -> dict[object, Callable[..., None]]:
        return defaultdict(lambda: lambda *arguments, **constants: None)


@pytest.fixture
def unlaunched(monkeypatch: pytest.MonkeyPatch) -> Operations:
    """What launches kernels, without them: on tensors without numbers, which nobody can read."""
    monkeypatch.setattr("dlrm_hybrid.kernels.device", Unlaunched(), raising=False)
    spec = find_spec("dlrm_hybrid.compress.device.launches")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)  # which nobody else can import
    spec.loader.exec_module(module)
    return module.TritonOps


@pytest.mark.parametrize("devices", [ONE_DEVICE(["meta"]), ["meta", "meta:1"]], ids=len)
@OWN_METHODS
def test_the_host_reads_nothing_but_the_numbers_of_a_step(
    method: GradientMethod,
    devices: list[str],
    unlaunched: Operations,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fake tensors raise where the host would wait for what they hold, and where devices mix."""
    for module in (sums, shard):
        monkeypatch.setattr(module, "pointers", lambda tensors: [0] * len(tensors))
    homes = [torch.device(name) for name in islice(cycle(devices), len(SPECS))]
    made, fake = original(method), FakeTensorMode()
    with fake:
        compressor = DeviceFeedback(made, homes, unlaunched)
    for step in range(3):
        with fake:
            pairs = zip(SPECS, homes, strict=True)
            gradients = [torch.empty(spec.shape, device=home) for spec, home in pairs]
            numbers = compressor.launch(gradients, step)
            announced_1 = compressor.residual.announced(numbers)
            assert {own_M.device for own_M in (*numbers, announced_1)} == {homes[0]}
            with pytest.raises(DataDependentOutputException):
                announced_1.tolist()
            parts = [SPECS[first :: len(devices)] for first in range(len(devices))]
            selections = compressor.finish([*map(numbers_of, numbers, parts)]).selections
            for selection, device in zip(selections, devices, strict=True):
                assert {part.device for part in selection} == {torch.device(device)}
                assert all(part.numel() > 0 for part in selection)
            compressor.residual.add(selections, gradients)
            compressor.residual.put_back(selections)
        compressor.report()  # takes note of the step in state that is no fake
    with fake:
        flushed = compressor.flush()
    assert [flushed[spec.name].device for spec in SPECS] == homes


def numbers_of(launched_M: Tensor, specs: Sequence[Spec]) -> list[int]:
    """Numbers that a step may bring: no flag, and of each tensor at most 30 elements selected."""
    splits = [*accumulate((min(30, spec.count) for spec in specs), initial=0)]
    numbers = [0] * (len(specs) + 1) + splits
    return numbers + [0] * (launched_M.numel() - len(numbers))


@NO_GPU
def test_a_model_in_a_cuda_graph_is_compressed_as_without() -> None:
    """Its passes are captured, and compression runs between them."""
    losses: dict[bool, list[float]] = {}
    for captures in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).cuda()
        compressor = Dct(density=0.1).for_parameters(model.named_parameters())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(32, 16, device="cuda")
        called = torch.cuda.make_graphed_callables(model, (x.clone(),)) if captures else model
        losses[captures] = []
        for step in range(12):
            optimizer.zero_grad()
            loss = (called(x)[:, 0] - x.sum(1).sin()).square().mean()
            loss.backward()
            gradients = [parameter.grad for parameter in model.parameters()]
            packet = compressor.encode(gradients, step)
            decode(packet).add_to([gradient.zero_() for gradient in gradients])
            optimizer.step()
            losses[captures].append(loss.item())
    assert losses[True][-1] < 0.9 * losses[True][0]
    np.testing.assert_allclose(losses[True], losses[False], rtol=1e-3)


@NO_GPU
@NO_TRITON
@OWN_METHODS
def test_a_step_waits_once(method: GradientMethod, waits: list[object]) -> None:
    device = torch.device("cuda", 0)
    compressor = feedback(method, [device], triton)
    for step in range(8):
        gradients = {name: one.to(device) for name, one in gradients_of(step).items()}
        waits.clear()
        selection(compressor, gradients, step)
        assert len(waits) == 1, f"step {step}: {[str(one) for one in waits]}"
