"""The methods of gradient compression as records, with the defaults of conf/gradient.

A record is what a method is asked to do; `for_parameters` and `ddp_state` make what does it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, final

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
    """One of the methods below: which part of its gradients a trainer sends, and how."""

    name: ClassVar[str]
    """As `gradient=NAME` of the configuration has it."""

    def __post_init__(self) -> None:
        check(self)
        faults = [*self._unread()] or [*methods()[self.name].faults(self.keys())]
        if faults:
            raise ValueError(f"{type(self).__name__}: {'; '.join(faults)}")

    def settings(self) -> dict[str, Any]:
        """The section `gradient` of a resolved configuration that says the same.

        What only one method or rule reads is a dictionary of its own; those of others are absent.
        """
        shared = {key: self._value(key) for key in _SHARED}
        return shared | {
            section: {one.name: self._setting(section, one.name) for one in fields(kind)}
            for section, kind in self._sections().items()
        }

    def keys(self) -> GradientKeys:
        """The same settings, as compressors are built from."""
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
        """A compressor of the gradients of some parameters, for any trainer.

        Args:
            named_parameters: as of `model.named_parameters()`.
            seed: of all that is drawn; the same for all trainers.
            lr: learning rate by step, counted from 0; for `residual="update"`.
            last_layer: that TernGrad leaves in float32, "" for none; None is the last one.
            trainer: number of this one, for `encode`; `reduce_gradients` asks the process group.
            trainers: how many there are, likewise.

        Raises:
            ValueError: names repeat, none needs a gradient, or `lr` is missing.
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
        """The state to register with `ddp_hook` as a communication hook of DDP.

        Args:
            model: in DDP, or what comes for gradients of zeros waits, as where DDP finds unused
                parameters. Without it the state cannot be saved, and TernGrad has no last layer.
            process_group: of the trainers; None for that of the model in DDP, else for all.
            seed: as of `for_parameters`, like what follows.
            lr: learning rate by step.
            last_layer: module that TernGrad leaves in float32.
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


@final
@dataclass(frozen=True, kw_only=True)
class NoCompression(GradientMethod):
    """Dense gradients in float32."""

    name: ClassVar[str] = "none"


@dataclass(frozen=True, kw_only=True)
class Thresholded(GradientMethod, Protocol):
    """What methods that select by thresholds share.

    Attributes:
        density: part of the elements of each tensor that is sent; the rest waits in a residual.
        scope: one threshold for each tensor, or one for all ("stage").
        aggregation: who selects: each trainer its own, the union of all, or a leader in turn.
        lifespan: most steps between two estimates of a threshold.
        renewal: fixed; or controlled, also when 20 % too few or 25 % too many are selected.
        staggered: with a fixed renewal, tensors renew at different steps.
        residual: accumulates gradients, or updates: gradients times the learning rate.
        precision: of the values sent; levels are integer multiples of a quantum.
        drain: discard or flush the residual now and then.
        drain_every: mean steps between two drains of a tensor.
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
    """Elements above a long-lived threshold are sent, the rest kept (Gupta et al., KDD 2021).

    Attributes:
        threshold: the rule that finds it, with its defaults. Its own record has its settings:
            `Sidco(window=3, lifespan=1000, renewal="controlled")` is this with them.
    """

    name: ClassVar[str] = "dct"
    threshold: Threshold = "histogram"
    lifespan: Positive = 1000
    renewal: Literal["controlled", "fixed"] = "controlled"


@final
@dataclass(frozen=True, kw_only=True)
class TopK(Thresholded):
    """The k largest elements of every step are sent, the rest kept (Aji and Heafield, 2017).

    Attributes:
        threshold: found in one pass, or by sorting; both find the same.
    """

    name: ClassVar[str] = "topk"
    threshold: Literal["histogram", "exact"] = "histogram"


@final
@dataclass(frozen=True, kw_only=True)
class Dgc(Thresholded):
    """Deep gradient compression: momentum and warm-up at the trainer (Lin et al., ICLR 2018).

    The optimizer must then have no momentum of its own.

    Attributes:
        threshold: the rule that finds it; its own is the k-th magnitude of a sample.
        part: of the elements that is sampled.
        lowest: part of k that is too few: the threshold is lowered.
        highest: times k that is too many: it is raised to the k-th magnitude.
        momentum: applied here, in the trainer.
        nesterov: Nesterov momentum.
        masking: what is sent loses its momentum.
        clip_norm: limit on the norm of a trainer's gradients, scaled by 1 / sqrt(trainers).
        warmup_steps: at each of `warmup_sparsities`, before `density` applies.
        warmup_sparsities: increasing.
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
    """A threshold between the mean and the largest magnitude (Fang et al., 2019).

    Attributes:
        search: bisect from mean to maximum, or come down from the maximum.
    """

    name: ClassVar[str] = "redsync"
    threshold: Literal["redsync"] = "redsync"
    search: Literal["bisect", "trim"] = "bisect"


@final
@dataclass(frozen=True, kw_only=True)
class Gaussian(Thresholded):
    """A threshold from a fitted normal distribution (Shi et al., GaussianKSGD, 2019).

    Attributes:
        fit: signed values as its authors, or magnitudes as in SIDCo's comparison.
    """

    name: ClassVar[str] = "gaussian"
    threshold: Literal["gaussian"] = "gaussian"
    fit: Literal["signed", "magnitude"] = "signed"


@final
@dataclass(frozen=True, kw_only=True)
class Hard(Thresholded):
    """One magnitude for all tensors and steps (Sahu et al., NeurIPS 2021).

    Attributes:
        magnitude: that one; None is 1 / (2 sqrt(k)), k elements of the model.
    """

    name: ClassVar[str] = "hard"
    threshold: Literal["hard"] = "hard"
    lifespan: Positive = 1_000_000_000
    magnitude: Rate | None = None


@final
@dataclass(frozen=True, kw_only=True)
class Sidco(Thresholded):
    """A threshold from a fitted distribution, in stages (Abdelmoniem et al., MLSys 2021).

    Attributes:
        distribution: that is fitted.
        adaptation: how the number of stages follows what estimates let through; or a number.
        window: estimates between two adaptations.
        tolerance: relative error of k within which nothing is adapted.
        first_density: part kept by the first of several stages.
        gamma: inverse of the gamma distribution: exact, or a closed bound.
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
    """CLT-k: one trainer, in turn, selects what all send (Chen et al., ScaleCom, NeurIPS 2020).

    Attributes:
        density: part of all elements that is sent; the rest waits in a residual.
        precision: of the values sent.
        low_pass: weight of new gradients in the residual; the paper has 0.1 at high rates.
    """

    name: ClassVar[str] = "cltk"
    density: Part = 0.01
    precision: PrecisionOrLevels = "float32"
    low_pass: Part = 1.0


@final
@dataclass(frozen=True, kw_only=True)
class Deft(GradientMethod):
    """DEFT: each trainer selects from its own fragment, all send the union (Yoon, Oh, ICPP 2023).

    Attributes:
        density: part of all elements that is sent; the rest waits in a residual.
        precision: of the values sent.
        budget: exactly k in all, or about k as in the paper.
    """

    name: ClassVar[str] = "deft"
    density: Part = 0.01
    precision: PrecisionOrLevels = "float32"
    budget: Literal["exact", "paper"] = "exact"


@final
@dataclass(frozen=True, kw_only=True)
class RandomK(GradientMethod):
    """The same random elements of every trainer, as a control (Stich et al., NeurIPS 2018).

    Attributes:
        density: part of all elements that is sent.
        precision: of the values sent.
        feedback: the rest waits in a residual; or is forgotten, and values times N / k are sent.
    """

    name: ClassVar[str] = "randomk"
    density: Part = 0.01
    precision: PrecisionOrLevels = "float32"
    feedback: bool = True


@final
@dataclass(frozen=True, kw_only=True)
class TernGrad(GradientMethod):
    """-1, 0 or 1 times a scale, right on average; no residual (Wen et al., NIPS 2017).

    Attributes:
        clip: gradients at this many standard deviations; None does not clip.
        sharing: all trainers share the largest scale.
        encoding: two bits an element, or five elements a byte.
        smallest: tensors of fewer elements stay float32, as does the last layer.
        pull: how a world's servers answer; None is "levels" where scales are shared.
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
"""Whose defaults the settings of a rule are, where another method has it find thresholds."""
