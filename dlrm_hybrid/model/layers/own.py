"""The layers of a model of a user's own: made, tried once, and cut into stages.

Shapes: B rows, N input width of a part, M output width, F tables, D embedding dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Never, cast, final

import torch
from torch import Tensor, nn

from dlrm_hybrid.model.own import INTERACTION, Features, OwnModel, Part
from dlrm_hybrid.outside import path_of
from dlrm_hybrid.rng import fold
from dlrm_hybrid.types import ConfigError

ROWS = 4  # of a trial
RESERVED = ("embedding", "statistics")  # begin names of tensors that are no layers
TOLERANCE = 1e-3  # by which products of other shapes may round
BESIDE = (
    "gives a row other numbers beside other rows; a row must not depend on its batch, which worlds "
    "split"
)


@final
class OwnLayers(nn.Module):
    """Consecutive parts of a user's module, with the initial values of the whole one.

    Gradients are copied where they leave autograd, which may hand out one tensor for several, or
    views: who takes them adds in place, and sends bytes.

    Args:
        spec: the whole model.
        names: of the parts.
        seed: that of the run.
    """

    def __init__(self, spec: OwnModel, names: Sequence[str], seed: int) -> None:
        super().__init__()
        whole = made(spec, seed)
        for name in names:
            self.add_module(name, whole.get_submodule(name))
        for parameter in self.parameters():
            parameter.register_hook(_copied)
        self._path = spec.path
        self._width = next(part.width for part in spec.parts if part.name == names[-1])

    def forward(self, x_BN: Tensor, pooled_BFD: Tensor | None, rows: range | None = None) -> Tensor:
        """Compute the output of the last part, float32 (B, M); `rows` has no meaning here."""
        for entered in (x_BN, pooled_BFD):
            if entered is not None and entered.requires_grad:
                entered.register_hook(_copied)
        num_rows = len(x_BN)
        for name, part in self._modules.items():
            assert part is not None
            x_BN = part(x_BN, pooled_BFD) if name == INTERACTION else part(x_BN)
        if x_BN.shape != (num_rows, self._width):
            raise ConfigError(
                f"model = {self._path!r}: {num_rows} rows came out as {_shown(x_BN)}, "
                f"must be float32 ({num_rows}, {self._width})"
            )
        return x_BN.contiguous()


def initial(spec: OwnModel, seed: int) -> dict[str, Tensor]:
    """The initial values of all parameters, by name: those of the module's constructor."""
    return {name: one.detach() for name, one in made(spec, seed).named_parameters()}


def made(spec: OwnModel, seed: int) -> nn.Module:
    """Make the whole module; its initial values depend on the seed alone.

    Raises:
        ConfigError: the constructor fails.
    """
    return _made(spec.module, spec.settings, spec.inputs, fold(seed, "initialise", "model"))


def tried(
    module: type[nn.Module], settings: Mapping[str, Any], inputs: Features
) -> tuple[Part, ...]:
    """Try each part of a module on a few rows; see `own.parts_of`."""
    trial = _Trial(path_of(module))
    model = _made(module, settings, inputs, seed=0)
    again = _made(module, settings, inputs, seed=0)
    for fault in chain(_faults_of(model), _differences(model, again)):
        trial.refuse(fault)
    generator = torch.Generator().manual_seed(0)
    x_BN = torch.randn(ROWS, inputs.dense, generator=generator)
    pooled_BFD = torch.randn(ROWS, inputs.tables, inputs.embedding_dim, generator=generator)
    entered = x_BN, pooled_BFD
    parts: list[Part] = []
    for name, part in _children(model).items():
        given = (x_BN, pooled_BFD) if name == INTERACTION else (x_BN,)
        x_BN = trial.part(name, part, given, is_first=not parts)
        shapes = {f"{name}.{one}": tuple(kept.shape) for one, kept in part.named_parameters()}
        parts.append(Part(name, x_BN.shape[1], shapes))
    if parts[-1].width != inputs.labels:
        wanted = f"(B, {inputs.labels}): as wide as `Features.labels` says"
        trial.refuse(f"part `{parts[-1].name}`, the last, gives {_shown(x_BN)}, must be {wanted}")
    if module.forward is not nn.Module.forward and not _are_close(
        trial.ran("its `forward`", model, entered), x_BN
    ):
        trial.refuse(
            "its `forward` gives other numbers than its parts one after the other, which are what "
            "is trained; needs parts for all that it does"
        )
    return tuple(parts)


class _Trial:
    """Tries the parts of a module; refuses what cannot be trained in any world."""

    def __init__(self, path: str) -> None:
        self._path = path

    def refuse(self, reason: str) -> Never:
        """Raise ConfigError with a reason."""
        raise ConfigError(f"model = {self._path!r}: {reason}")

    def part(
        self, name: str, part: nn.Module, given: tuple[Tensor, ...], *, is_first: bool
    ) -> Tensor:
        """Run a part forward and backward on a few rows; returns its output."""
        entered = [one.detach().requires_grad_() for one in given]
        called = f"part `{name}`"
        what = f"{called} of {', '.join(map(_shown, given))}"
        before = torch.get_rng_state()
        left_BM = self.ran(called, part, entered)
        if not torch.equal(before, torch.get_rng_state()):
            torch.set_rng_state(before)
            self.refuse(
                f"{called} draws random numbers, which would differ between processes; needs "
                "parts without dropout"
            )
        if left_BM.dim() != 2 or len(left_BM) != ROWS or left_BM.dtype is not torch.float32:
            self.refuse(f"{what} gives {_shown(left_BM)}, must be float32 ({ROWS}, width)")
        for rows, training, why in (
            (ROWS // 2, True, BESIDE),
            (1, True, BESIDE),
            (ROWS, False, "depends on `training`, and evaluations here do not set it"),
        ):
            other_bM = self.ran(called, part.train(training), [one[:rows] for one in entered])
            if not _are_close(other_bM, left_BM[:rows]):
                self.refuse(f"{called} {why}")
        part.train()
        leaves = dict(part.named_parameters())
        wanted = [*leaves.values(), *entered[is_first:]]
        try:
            found = torch.autograd.grad(left_BM.sum(), wanted, allow_unused=True) if wanted else ()
        except Exception as error:
            self.refuse(f"backward of {what} raised {type(error).__name__}: {error}")
        names = (*(f"{name}.{one}" for one in leaves), *("its input", "the tables")[is_first:])
        for one, gradient in zip(names, cast("Sequence[Tensor | None]", found), strict=False):
            if gradient is None:
                self.refuse(f"{called} makes no use of {one}: it gets no gradient")
        return left_BM.detach()

    def ran(self, called: str, module: nn.Module, given: Sequence[Tensor]) -> Tensor:
        """The output of a part, or of the whole."""
        what = f"{called} of {', '.join(map(_shown, given))}"
        try:
            left: object = module(*given)
        except Exception as error:
            self.refuse(f"{what} raised {type(error).__name__}: {error}")
        if not isinstance(left, Tensor):
            self.refuse(f"{what} gives a {type(left).__name__}, must be a tensor")
        return left


def _made(
    module: type[nn.Module], settings: Mapping[str, Any], inputs: Features, seed: int
) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        try:
            return cast("Callable[..., nn.Module]", module)(inputs, **settings)
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"model = {path_of(module)!r}: its constructor raised {type(error).__name__}: "
                f"{error}"
            ) from error


def _faults_of(model: nn.Module) -> Iterator[str]:
    """What a module has that cannot be cut, saved, or sent."""
    children = [*_children(model)]
    if INTERACTION not in children:
        yield (
            f"has the parts {', '.join(children) or 'none'}; one must be named `{INTERACTION}`, "
            "which is given the rows of the tables"
        )
    for name in set(children) & set(RESERVED):
        yield f"part `{name}`: tensors of this name are the program's own; needs another name"
    yield from _shared(model)
    for name, one in model.named_parameters():
        if isinstance(one, nn.parameter.UninitializedParameter):
            yield f"parameter `{name}` has no shape yet; needs one from `Features`"
        elif one.dtype is not torch.float32 or not one.is_cpu or not one.dim():
            yield f"parameter `{name}` is {_shown(one)}; must be float32, with a dimension"
        elif not one.requires_grad:
            yield f"parameter `{name}` takes no gradient; all of a model of your own must"
    kept = model.state_dict()
    for name in (name for name, _ in model.named_buffers() if name in kept):
        yield (
            f"buffer `{name}` is kept with the weights, and each trainer would have its own; only "
            "constants can be buffers, with persistent=False"
        )


def _shared(model: nn.Module) -> Iterator[str]:
    """Parameters that belong to no part, or to two."""
    homes: dict[nn.Parameter, str] = {}
    for name, one in model.named_parameters(remove_duplicate=False):
        part, _, inside = name.partition(".")
        first = homes.setdefault(one, name)
        if not inside:
            yield f"parameter `{name}` is in no part; needs to be in a child module"
        elif first.partition(".")[0] != part:
            yield f"parameter `{name}` is `{first}` too; parts cannot share any"
    if not homes:
        yield "has no parameters"


def _children(model: nn.Module) -> dict[str, nn.Module]:
    """All parts by name; `named_children` leaves out a module that it has had before."""
    held = cast("Mapping[str, nn.Module | None]", vars(model)["_modules"])
    return {name: part for name, part in held.items() if part is not None}


def _differences(model: nn.Module, again: nn.Module) -> Iterator[str]:
    """What differs between two modules made with the same seed."""
    others = dict(again.named_parameters())
    for name, one in model.named_parameters():
        other = others.get(name)
        if other is None or other.shape != one.shape or not torch.equal(one, other):
            yield (
                f"parameter `{name}` begins with other values when it is made again with the same "
                "seed; the constructor must draw from torch alone"
            )


def _are_close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(
        one, other, TOLERANCE, TOLERANCE, equal_nan=True
    )


def _shown(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _copied(gradient: Tensor) -> Tensor:
    return gradient.clone(memory_format=torch.contiguous_format)
