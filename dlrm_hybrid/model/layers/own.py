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

ROWS = 4  # number of rows of a trial
RESERVED = ("embedding", "statistics")  # begin names of tensors that are no layers
TOLERANCE = 1e-3  # products of other shapes round otherwise
BESIDE = (
    "gives a row other numbers beside other rows; a row must not depend on its batch, which worlds "
    "split"
)


@final
class OwnLayers(nn.Module):
    """Consecutive parts of a user's module, with the initial values of the whole module.

    Gradients are copied where they leave autograd, which may hand out one tensor for several, or
    views: who takes them adds in place, and sends bytes.
    """

    def __init__(self, spec: OwnModel, names: Sequence[str], seed: int) -> None:
        super().__init__()
        model = made(spec, seed)
        for name in names:
            self.add_module(name, model.get_submodule(name))
        for parameter in self.parameters():
            parameter.register_hook(_copied)
        self._path = spec.path
        self._width = next(part.width for part in spec.parts if part.name == names[-1])

    def forward(self, x_BN: Tensor, pooled_BFD: Tensor | None, rows: range | None = None) -> Tensor:
        """Compute the output of the last part, float32 (B, M); `rows` has no meaning here."""
        for tensor in (x_BN, pooled_BFD):
            if tensor is not None and tensor.requires_grad:
                tensor.register_hook(_copied)
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
    """The initial values of all parameters by name, as the module's constructor draws them."""
    return {name: parameter.detach() for name, parameter in made(spec, seed).named_parameters()}


def made(spec: OwnModel, seed: int) -> nn.Module:
    """Make the whole module, drawn by the seed alone; ConfigError if its constructor fails."""
    return _made(spec.module, spec.settings, spec.inputs, fold(seed, "initialise", "model"))


def tried(
    module: type[nn.Module], settings: Mapping[str, Any], inputs: Features
) -> tuple[Part, ...]:
    """Try each part of a module on a few rows; see `own.parts_of`."""
    trial = _Trial(path_of(module))
    model = _made(module, settings, inputs, seed=0)
    twin = _made(module, settings, inputs, seed=0)
    for fault in chain(_faults_of(model), _differences(model, twin)):
        trial.refuse(fault)
    generator = torch.Generator().manual_seed(0)
    x_BN = torch.randn(ROWS, inputs.dense, generator=generator)
    pooled_BFD = torch.randn(ROWS, inputs.tables, inputs.embedding_dim, generator=generator)
    batch = x_BN, pooled_BFD
    parts: list[Part] = []
    for name, part in _children(model).items():
        args = (x_BN, pooled_BFD) if name == INTERACTION else (x_BN,)
        x_BN = trial.part(name, part, args, is_first=not parts)
        shapes = {f"{name}.{key}": tuple(value.shape) for key, value in part.named_parameters()}
        parts.append(Part(name, x_BN.shape[1], shapes))
    if parts[-1].width != inputs.labels:
        shape = f"(B, {inputs.labels}): as wide as `Features.labels` says"
        trial.refuse(f"part `{parts[-1].name}`, the last, gives {_shown(x_BN)}, must be {shape}")
    if module.forward is not nn.Module.forward and not _are_close(
        trial.ran("its `forward`", model, batch), x_BN
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
        raise ConfigError(f"model = {self._path!r}: {reason}")

    def part(
        self, name: str, part: nn.Module, args: tuple[Tensor, ...], *, is_first: bool
    ) -> Tensor:
        """Run a part forward and backward on a few rows; returns its output."""
        inputs = [tensor.detach().requires_grad_() for tensor in args]
        title = f"part `{name}`"
        call = f"{title} of {', '.join(map(_shown, args))}"
        rng_state = torch.get_rng_state()
        out_BM = self.ran(title, part, inputs)
        if not torch.equal(rng_state, torch.get_rng_state()):
            torch.set_rng_state(rng_state)
            self.refuse(
                f"{title} draws random numbers, which would differ between processes; needs "
                "parts without dropout"
            )
        if out_BM.dim() != 2 or len(out_BM) != ROWS or out_BM.dtype is not torch.float32:
            self.refuse(f"{call} gives {_shown(out_BM)}, must be float32 ({ROWS}, width)")
        for rows, training, why in (
            (ROWS // 2, True, BESIDE),
            (1, True, BESIDE),
            (ROWS, False, "depends on `training`, and evaluations here do not set it"),
        ):
            part_bM = self.ran(title, part.train(training), [tensor[:rows] for tensor in inputs])
            if not _are_close(part_bM, out_BM[:rows]):
                self.refuse(f"{title} {why}")
        part.train()
        parameters = dict(part.named_parameters())
        leaves = [*parameters.values(), *inputs[is_first:]]
        try:
            grads = torch.autograd.grad(out_BM.sum(), leaves, allow_unused=True) if leaves else ()
        except Exception as error:
            self.refuse(f"backward of {call} raised {type(error).__name__}: {error}")
        names = (*(f"{name}.{key}" for key in parameters), *("its input", "the tables")[is_first:])
        for source, gradient in zip(names, cast("Sequence[Tensor | None]", grads), strict=False):
            if gradient is None:
                self.refuse(f"{title} makes no use of {source}: it gets no gradient")
        return out_BM.detach()

    def ran(self, title: str, module: nn.Module, args: Sequence[Tensor]) -> Tensor:
        call = f"{title} of {', '.join(map(_shown, args))}"
        try:
            output: object = module(*args)
        except Exception as error:
            self.refuse(f"{call} raised {type(error).__name__}: {error}")
        if not isinstance(output, Tensor):
            self.refuse(f"{call} gives a {type(output).__name__}, must be a tensor")
        return output


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
    """Reasons why a module cannot be cut, saved, or sent."""
    children = [*_children(model)]
    if INTERACTION not in children:
        yield (
            f"has the parts {', '.join(children) or 'none'}; one must be named `{INTERACTION}`, "
            "which is given the rows of the tables"
        )
    for name in set(children) & set(RESERVED):
        yield f"part `{name}`: tensors of this name are the program's own; needs another name"
    yield from _shared(model)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            yield f"parameter `{name}` has no shape yet; needs one from `Features`"
        elif parameter.dtype is not torch.float32 or not parameter.is_cpu or not parameter.dim():
            yield f"parameter `{name}` is {_shown(parameter)}; must be float32, with a dimension"
        elif not parameter.requires_grad:
            yield f"parameter `{name}` takes no gradient; all of a model of your own must"
    state = model.state_dict()
    for name in (name for name, _ in model.named_buffers() if name in state):
        yield (
            f"buffer `{name}` is kept with the weights, and each trainer would have its own; only "
            "constants can be buffers, with persistent=False"
        )


def _shared(model: nn.Module) -> Iterator[str]:
    """Parameters that belong to no part, or to two."""
    homes: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        part, _, inside = name.partition(".")
        home = homes.setdefault(parameter, name)
        if not inside:
            yield f"parameter `{name}` is in no part; needs to be in a child module"
        elif home.partition(".")[0] != part:
            yield f"parameter `{name}` is `{home}` too; parts cannot share any"
    if not homes:
        yield "has no parameters"


def _children(model: nn.Module) -> dict[str, nn.Module]:
    """All parts by name; `named_children` leaves out a module that it has had before."""
    modules = cast("Mapping[str, nn.Module | None]", vars(model)["_modules"])
    return {name: part for name, part in modules.items() if part is not None}


def _differences(model: nn.Module, twin: nn.Module) -> Iterator[str]:
    twins = dict(twin.named_parameters())
    for name, parameter in model.named_parameters():
        copy = twins.get(name)
        if copy is None or copy.shape != parameter.shape or not torch.equal(parameter, copy):
            yield (
                f"parameter `{name}` begins with other values when it is made again with the same "
                "seed; the constructor must draw from torch alone"
            )


def _are_close(output: Tensor, expected: Tensor) -> bool:
    return output.shape == expected.shape and torch.allclose(
        output, expected, TOLERANCE, TOLERANCE, equal_nan=True
    )


def _shown(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _copied(gradient: Tensor) -> Tensor:
    return gradient.clone(memory_format=torch.contiguous_format)
