"""What a line of `events.jsonl` must say for tables and pictures to be made from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from pydantic_core import from_json

from dlrm_hybrid.telemetry.traffic import Phase

OPEN = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
MOST = 1e24
PHASES = (Phase.TRAIN, Phase.EVALUATE, Phase.CHECKPOINT)

Count = Annotated[int, Field(ge=0, lt=2**63)]
Figure = Annotated[float, Field(ge=-MOST, le=MOST)]
Amount = Annotated[float, Field(ge=0, le=MOST)]
Window = Annotated[tuple[Figure, ...], Field(min_length=3, max_length=8)]


def _has_phases(by_phase: dict[Any, Any]) -> dict[Any, Any]:
    missing = [phase.value for phase in PHASES if phase not in by_phase]
    if missing:
        raise ValueError(f"says nothing of {', '.join(missing)}")
    return by_phase


@dataclass(config=OPEN, frozen=True)
class Head:
    """What every event says, and of which many say more."""

    kind: str
    step: Count
    time_seconds: Amount
    samples: Count = 0


@dataclass(config=OPEN, frozen=True)
class Started:
    """The start of an attempt."""

    attempt: Count
    rank: Count
    role: str
    samples_per_step: Count = 0


@dataclass(config=OPEN, frozen=True)
class Progress:
    """A point of the loss curve."""

    samples: Count
    rows: Count
    loss: Figure
    accuracy: Figure
    timed_rows: Count
    timed_seconds: Amount
    timed_cpu_seconds: Amount
    seconds_by_span: dict[str, Amount]


@dataclass(config=OPEN, frozen=True)
class Compressed:
    """What compression let through, of one tensor or boundary."""

    elements: Amount
    sent: Amount
    threshold: Figure | None


@dataclass(config=OPEN, frozen=True)
class Compression:
    """What compression let through."""

    of: dict[str, Compressed]


@dataclass(config=OPEN, frozen=True)
class Evaluated:
    """Scores."""

    samples: Count
    seconds: Amount
    log_loss: Figure
    accuracy: Figure
    auc: Figure | None
    normalized_entropy: Figure | None
    base_rate: Figure


@dataclass(config=OPEN, frozen=True)
class Saved:
    """A checkpoint."""

    seconds: Amount


@dataclass(config=OPEN, frozen=True)
class Sent:
    """Messages of a class of traffic."""

    messages: Count
    bytes: Count
    dense_equivalent_bytes: Count


@dataclass(config=OPEN, frozen=True)
class Received:
    """The same at the other end."""

    bytes: Count


@dataclass(config=OPEN, frozen=True)
class Strangers:
    """What came from outside the run."""

    foreign_messages: Count
    refused_connections: Count


@dataclass(config=OPEN, frozen=True)
class Versions:
    """Weights that servers have made, and told."""

    told: Count
    elements: Count


@dataclass(config=OPEN, frozen=True)
class Interface:
    """Use of a link."""

    address: str
    rate_bits_per_second: Amount | None
    seconds: Amount
    busier_bytes: Amount
    sent_bytes: Amount
    received_bytes: Amount
    series: tuple[Window, ...]


ByPhase = AfterValidator(_has_phases)


@dataclass(config=OPEN, frozen=True)
class RankValues:
    """What a rank says at its end."""

    rank: Count
    role: str
    timed_steps: Count
    seconds: Annotated[dict[str, Amount], ByPhase]
    cpu_seconds: Annotated[dict[str, Amount], ByPhase]
    seconds_by_span: dict[str, Amount]
    traffic: Annotated[dict[str, dict[str, Sent]], ByPhase] | None
    received: Annotated[dict[str, dict[str, Received]], ByPhase] | None
    cpu_series: tuple[Annotated[Window, Field(max_length=3)], ...] = ()
    versions: Versions | None = None
    strangers: Strangers | None = None
    interface: Interface | None = None


_HEAD = TypeAdapter(Head)
_VALUES: Mapping[str, TypeAdapter[Any]] = {
    "started": TypeAdapter(Started),
    "progress": TypeAdapter(Progress),
    "compression": TypeAdapter(Compression),
    "evaluated": TypeAdapter(Evaluated),
    "saved": TypeAdapter(Saved),
    "rank": TypeAdapter(RankValues),
}


def fault_of(line: bytes) -> str | None:
    """What is wrong with a line that is to be an event, with the field; None if nothing is."""
    try:
        from_json(line, allow_inf_nan=False)
        head = _HEAD.validate_json(line)
        values = _VALUES.get(head.kind)
        if values is not None:
            values.validate_json(line)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = repr(".".join(str(part) for part in fault["loc"]))[1:-1]
        return f"{where} = {fault['input']!r:.80}: {fault['msg']}"
    except ValueError as error:
        return f"no event: {error}"
    return None
