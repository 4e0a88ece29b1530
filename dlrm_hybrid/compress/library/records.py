"""The methods of gradient compression as records, with the defaults of conf/gradient.

Records hold settings; `for_parameters` and `ddp_state` create what compresses.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from decimal import Decimal
from numbers import Real
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, Self, final

from typing_extensions import override, runtime_checkable

from dlrm_hybrid.bounds import BelowOne, Bound, Count, Part, Positive, PrecisionOrLevels, Rate
from dlrm_hybrid.compress.gradient.methods import GradientKeys, methods, rules
from dlrm_hybrid.compress.library.checks import check

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.nn import Module

    from dlrm_hybrid.compress.library.compressor import ParameterCompressor
    from dlrm_hybrid.compress.library.ddp import DdpState

Threshold = Literal["exact", "histogram", "dgc", "redsync", "gaussian", "hard", "sidco"]
BetweenZeroAndOne = Annotated[float, Bound(gt=0, lt=1)]

_SHARED = tuple(one.name for one in fields(GradientKeys))


@runtime_checkable
class GradientMethod(Protocol):
    """A gradient compression method: which elements of a gradient are sent, and how."""

    name: ClassVar[str]
    """Its name in the configuration, `gradient=NAME`."""

    def __new__(cls, *given: object, **settings: object) -> Self:
        """Refuse unknown settings in words of ours, before the generated constructor does."""
        known = [one.name for one in fields(cls)]  # pyright: ignore[reportArgumentType]
        if given or not settings.keys() <= {*known}:
            raise TypeError(_unfit(cls.__name__, known, given, settings))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check(self)
        faults = [*self._unread()] or [*methods()[self.name].faults(self.keys())]
        if faults:
            raise ValueError(f"{type(self).__name__}: {'; '.join(faults)}")

    def settings(self) -> dict[str, Any]:
        """The equivalent section `gradient` of a resolved configuration.

        Settings that only one method or rule reads are nested; those of others are absent.
        """
        shared = {key: self._value(key) for key in _SHARED}
        return shared | {
            section: {one.name: self._setting(section, one.name) for one in fields(kind)}
            for section, kind in self._sections().items()
        }

    def keys(self) -> GradientKeys:
        """The same settings, in the form that compressors are built from."""
        given = self.settings()
        own = {key: kind(**given.pop(key)) for key, kind in self._sections().items()}
        keys = GradientKeys(**given)
        vars(keys).update(own)  # as the configuration has them
        return keys

    def for_parameters(
        self,
        named_parameters: Iterable[tuple[str, Tensor]],
        *,
        seed: int = 0,
        lr: Callable[[int], float] | None = None,
        last_layer: str | None = None,
        trainer: int = 0,
        trainers: int = 1,
    ) -> ParameterCompressor:
        """Create a compressor for the gradients of these parameters, for use in any training loop.

        Args:
            named_parameters: from `model.named_parameters()`; frozen ones are left out.
            seed: of all random choices; must be the same on all trainers.
            lr: function from step (counted from 0) to learning rate; for `residual="update"`.
            last_layer: module that TernGrad sends in float32; None for the last, "" for none.
            trainer: index of this trainer, for `encode`; `reduce_gradients` takes the rank instead.
            trainers: number of trainers, likewise.

        Raises:
            ValueError: names repeat, a parameter cannot be compressed, or `lr` is missing.
        """
        from dlrm_hybrid.compress.library.compressor import Options, ParameterCompressor

        options = Options(
            seed=seed, lr=lr, last_layer=last_layer, trainer=trainer, trainers=trainers
        )
        return ParameterCompressor(self, named_parameters, options)

    def ddp_state(
        self,
        model: Module | None = None,
        process_group: ProcessGroup | None = None,
        *,
        seed: int = 0,
        lr: Callable[[int], float] | None = None,
        last_layer: str | None = None,
    ) -> DdpState:
        """Create the state of a DDP communication hook, to be registered with `ddp_hook`.

        Args:
            model: the DDP module. With a plain model or None, gradients that are zero on all ranks
                count as those of unused parameters; with None the state cannot be saved, either.
            process_group: of the trainers; None for the DDP module's, or for the default group.
            seed: of all random choices; must be the same on all trainers.
            lr: function from step (counted from 0) to learning rate; for `residual="update"`.
            last_layer: name of the module that TernGrad sends in float32.

        Raises:
            ValueError: `lr` is missing, or other ranks hold parts of a parameter, as in FSDP.
        """
        from dlrm_hybrid.compress.library.compressor import Options
        from dlrm_hybrid.compress.library.ddp import DdpState

        options = Options(seed=seed, lr=lr, last_layer=last_layer)
        return DdpState(self, model, process_group, options)

    def _sections(self) -> dict[str, type]:
        """The types of the settings that this method and its rule read, by their section."""
        rule = rules().get(getattr(self, "threshold", ""))
        return {**(rule.sections if rule else {}), **methods()[self.name].sections}

    def _value(self, key: str) -> Any:
        """Of a key that several methods read."""
        if key == "sparsity":
            return float(1 - Decimal(repr(getattr(self, "density", 1.0))))
        return getattr(self, key, "float32" if key == "precision" else None)

    def _setting(self, section: str, key: str) -> Any:
        """Of a key of a section: this record's own, or the default of the one that has it."""
        return getattr(self if hasattr(self, key) else OWNERS[section], key)

    def _unread(self) -> Iterator[str]:
        """Faults of values that were given and that nothing reads."""
        read = {one.name for kind in self._sections().values() for one in fields(kind)}
        for one in fields(self):  # pyright: ignore[reportArgumentType]
            value = getattr(self, one.name)
            if one.name not in {*read, *_SHARED, "density"} and value != one.default:
                rule = self._value("threshold")
                yield f"{one.name} = {value!r}: has no effect with threshold = {rule!r}"


def _unfit(
    method: str, known: Sequence[str], given: Sequence[object], settings: Mapping[str, object]
) -> str:
    """What is wrong with the arguments of a method, and what was meant."""
    if not known:
        return f"{method} has no settings"
    if given:
        return f"{method} takes its settings by name: {method}({known[0]}={given[0]!r})"
    name, value = next((name, value) for name, value in settings.items() if name not in known)
    text = f"{method} has no setting {name!r}"
    if name == "sparsity" and "density" in known:
        density = 1 - Decimal(str(value)) if isinstance(value, Real) else "1 - sparsity"
        return f"{text}; it has the fraction that is sent, density={density}"
    near = difflib.get_close_matches(name, known, n=1)
    return f"{text}; did you mean {near[0]}?" if near else f"{text}; it has {', '.join(known)}"


@final
@dataclass(frozen=True, kw_only=True)
class NoCompression(GradientMethod):
    """Sends dense gradients in float32."""

    name: ClassVar[str] = "none"


@dataclass(frozen=True, kw_only=True)
class Thresholded(GradientMethod, Protocol):
    """Settings shared by all methods that select elements by a threshold.

    Attributes:
        density: fraction of each tensor's elements that is sent; the rest stays in a residual.
        scope: one threshold per tensor, or one for all ("stage").
        aggregation: whose selection is sent: each trainer's own, the union, or a leader's in turn.
        lifespan: steps after which a threshold is computed again, at the latest.
        renewal: fixed; or controlled, which also renews at 20 % too few or 25 % too many elements.
        staggered: with fixed renewal, tensors renew their thresholds at different steps.
        residual: what accumulates: gradients, or updates (gradients times the learning rate).
        precision: type of the values sent; "levels" are integer multiples of a quantum.
        drain: whether residuals are discarded or sent ("flush") at random steps.
        drain_every: mean number of steps between two drains of a tensor.
    """

    density: Part = 0.01
    scope: Literal["tensor", "stage"] = "tensor"
    aggregation: Literal["own", "union", "leader"] = "own"
    lifespan: Positive = 1
    renewal: Literal["controlled", "fixed"] = "fixed"
    staggered: bool = False
    residual: Literal["gradient", "update"] = "gradient"
    precision: PrecisionOrLevels = "float32"
    drain: Literal["none", "discard", "flush"] = "none"
    drain_every: Positive = 1_000_000


@final
@dataclass(frozen=True, kw_only=True)
class Dct(Thresholded):
    """DCT-DP: sends what exceeds a long-lived threshold (Gupta et al., KDD 2021).

    Attributes:
        threshold: rule that computes it. To set its options, use the record of the rule instead:
            `Sidco(window=3, lifespan=1000, renewal="controlled")`.
    """

    name: ClassVar[str] = "dct"
    threshold: Threshold = "histogram"
    lifespan: Positive = 1000
    renewal: Literal["controlled", "fixed"] = "controlled"


@final
@dataclass(frozen=True, kw_only=True)
class TopK(Thresholded):
    """Sends the k largest elements of each tensor in every step (Aji and Heafield, EMNLP 2017).

    Attributes:
        threshold: whether it is found in one pass or by sorting; the result is the same.
    """

    name: ClassVar[str] = "topk"
    threshold: Literal["histogram", "exact"] = "histogram"


@final
@dataclass(frozen=True, kw_only=True)
class Dgc(Thresholded):
    """Deep gradient compression, with momentum correction and warm-up (Lin et al., ICLR 2018).

    It applies momentum itself: use an optimizer without.

    Attributes:
        threshold: rule that computes the threshold; DGC's own takes the k-th magnitude of a sample.
        part: fraction of the elements that is sampled.
        lowest: the threshold is lowered if fewer than this multiple of k elements exceed it.
        highest: the threshold is raised if more than this multiple of k elements exceed it.
        momentum: coefficient, applied before compression.
        nesterov: whether momentum is Nesterov's.
        masking: whether the momentum of elements that are sent is reset (factor masking).
        clip_norm: limit on the norm of a trainer's gradients, scaled by 1 / sqrt(trainers).
        warmup_steps: number of steps at each of `warmup_sparsities`, before `density` applies.
        warmup_sparsities: increasing sparsities of the warm-up.
    """

    name: ClassVar[str] = "dgc"
    density: Part = 0.001
    threshold: Threshold = "dgc"
    part: Part = 0.01
    lowest: Part = 0.8
    highest: Annotated[float, Bound(ge=1)] = 1.3
    momentum: BelowOne = 0.9
    nesterov: bool = False
    masking: bool = True
    clip_norm: Rate | None = None
    warmup_steps: Count = 100
    warmup_sparsities: tuple[BelowOne, ...] = (0.75, 0.9375, 0.984375, 0.996)


@final
@dataclass(frozen=True, kw_only=True)
class RedSync(Thresholded):
    """RedSync: searches between mean and maximum magnitude for a threshold (Fang et al., 2019).

    Attributes:
        search: bisect between mean and maximum, or step down from the maximum ("trim").
    """

    name: ClassVar[str] = "redsync"
    threshold: Literal["redsync"] = "redsync"
    search: Literal["bisect", "trim"] = "bisect"


@final
@dataclass(frozen=True, kw_only=True)
class Gaussian(Thresholded):
    """Gaussian-k: a threshold from a fitted normal distribution (Shi et al., 2019).

    Attributes:
        fit: to signed values, as its authors do, or to magnitudes, as in SIDCo's comparison.
    """

    name: ClassVar[str] = "gaussian"
    threshold: Literal["gaussian"] = "gaussian"
    fit: Literal["signed", "magnitude"] = "signed"


@final
@dataclass(frozen=True, kw_only=True)
class Hard(Thresholded):
    """Hard threshold: one constant for all tensors and steps (Sahu et al., NeurIPS 2021).

    Attributes:
        magnitude: the threshold; None for 1 / (2 sqrt(k)), with k = density times all elements.
    """

    name: ClassVar[str] = "hard"
    threshold: Literal["hard"] = "hard"
    lifespan: Positive = 1_000_000_000
    magnitude: Rate | None = None


@final
@dataclass(frozen=True, kw_only=True)
class Sidco(Thresholded):
    """SIDCo: multi-stage fit of a sparsity-inducing distribution (Abdelmoniem et al., MLSys 2021).

    Attributes:
        distribution: family that is fitted to the magnitudes.
        adaptation: how the number of stages adapts to the density achieved, or a fixed number.
        window: number of estimates between two adaptations.
        tolerance: relative error of k that triggers no adaptation.
        first_density: fraction kept by the first of several stages.
        gamma: inverse of the gamma distribution: exact, or a closed-form bound.
    """

    name: ClassVar[str] = "sidco"
    threshold: Literal["sidco"] = "sidco"
    distribution: Literal["exponential", "gamma", "pareto"] = "exponential"
    adaptation: Literal["best", "literal", "flip"] | Annotated[int, Bound(ge=1, le=32)] = "best"
    window: Positive = 5
    tolerance: BetweenZeroAndOne = 0.2
    first_density: BetweenZeroAndOne = 0.25
    gamma: Literal["exact", "closed"] = "exact"


@final
@dataclass(frozen=True, kw_only=True)
class CltK(GradientMethod):
    """CLT-k: one trainer in turn selects for all (Chen et al., ScaleCom, NeurIPS 2020).

    Attributes:
        density: fraction of all elements that is sent; the rest stays in a residual.
        precision: type of the values sent.
        low_pass: weight of new gradients in the residual; the paper uses 0.1 at high rates.
    """

    name: ClassVar[str] = "cltk"
    density: Part = 0.01
    precision: PrecisionOrLevels = "float32"
    low_pass: Part = 1.0


@final
@dataclass(frozen=True, kw_only=True)
class Deft(GradientMethod):
    """DEFT: trainers select from disjoint fragments and send the union (Yoon, Oh, ICPP 2023).

    Attributes:
        density: fraction of all elements that is sent; the rest stays in a residual.
        precision: type of the values sent.
        budget: exactly k elements in total, or about k, as in the paper.
    """

    name: ClassVar[str] = "deft"
    density: Part = 0.01
    precision: PrecisionOrLevels = "float32"
    budget: Literal["exact", "paper"] = "exact"


@final
@dataclass(frozen=True, kw_only=True)
class RandomK(GradientMethod):
    """Random-k, a control: all send the same random elements (Stich et al., NeurIPS 2018).

    Attributes:
        density: fraction of all elements that is sent.
        precision: type of the values sent.
        feedback: True keeps the rest in a residual; False drops it, and sends values times N / k.
    """

    name: ClassVar[str] = "randomk"
    density: Part = 0.01
    precision: PrecisionOrLevels = "float32"
    feedback: bool = True


@final
@dataclass(frozen=True, kw_only=True)
class TernGrad(GradientMethod):
    """TernGrad: rounds to -1, 0 or 1 times a scale, without bias (Wen et al., NIPS 2017).

    Attributes:
        clip: gradients are clipped at this many standard deviations; None turns clipping off.
        sharing: whether all trainers use the largest of their scales.
        encoding: two bits per element, or five elements per byte ("trits").
        smallest: tensors with fewer elements are sent in float32, and so is the last layer.
        pull: what a world's servers send back; None is "levels" with shared scales, else "weights".
    """

    name: ClassVar[str] = "terngrad"
    clip: Rate | None = 2.5
    sharing: bool = True
    encoding: Literal["bits", "trits"] = "bits"
    smallest: Positive = 256
    pull: Literal["levels", "weights"] | None = None

    @override
    def settings(self) -> dict[str, Any]:
        pull = self.pull or ("levels" if self.sharing else "weights")
        made = super().settings()
        return made | {"terngrad": made["terngrad"] | {"pull": pull}}


OWNERS: dict[str, type[GradientMethod]] = {
    "dgc": Dgc,
    "redsync": RedSync,
    "gaussian": Gaussian,
    "hard": Hard,
    "sidco": Sidco,
}
"""The method whose defaults a rule has when another method computes thresholds by it."""
