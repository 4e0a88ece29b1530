"""What one rank of a world sends and spends, apart for warm-up, training, evaluating and saving."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from dlrm_hybrid.telemetry.interface import InterfaceMeter
from dlrm_hybrid.telemetry.meter import WARMUP_STEPS
from dlrm_hybrid.telemetry.traffic import Phase, TrafficCounter


def _zeros() -> dict[Phase, float]:
    return dict.fromkeys(Phase, 0.0)


def _counters() -> dict[Phase, TrafficCounter]:
    return {phase: TrafficCounter() for phase in Phase}


@dataclass(slots=True)
class RankMeter:
    """Clock and counters of one rank.

    Attributes:
        on_phase: told the counter of every phase that begins.
        interface: the rank's, if it has one of its own.
    """

    on_phase: Callable[[TrafficCounter], None]
    interface: InterfaceMeter | None = None
    _phase: Phase = Phase.WARMUP
    _steps: int = 0
    _wall: float = field(default_factory=time.perf_counter)
    _cpu: float = field(default_factory=time.process_time)
    _seconds: dict[Phase, float] = field(default_factory=_zeros)
    _cpu_seconds: dict[Phase, float] = field(default_factory=_zeros)
    _counters: dict[Phase, TrafficCounter] = field(default_factory=_counters)

    def switch(self, phase: Phase) -> None:
        """What comes now belongs to `phase`."""
        wall, cpu = time.perf_counter(), time.process_time()
        self._seconds[self._phase] += wall - self._wall
        self._cpu_seconds[self._phase] += cpu - self._cpu
        self._phase, self._wall, self._cpu = phase, wall, cpu
        self.on_phase(self._counters[phase])
        if self.interface is not None:
            self.interface.switch(phase is Phase.TRAIN)

    def step_done(self) -> None:
        """Count a training step; the first ones of an attempt are warm-up."""
        self._steps += 1
        if self._steps == WARMUP_STEPS:
            self.switch(Phase.TRAIN)

    @contextmanager
    def within(self, phase: Phase) -> Generator[None, None, None]:
        """What happens inside belongs to `phase`, what follows to the phase before."""
        before = self._phase
        self.switch(phase)
        try:
            yield
        finally:
            self.switch(before)

    def values(self) -> dict[str, Any]:
        """Everything until now, as JSON values."""
        self.switch(self._phase)
        return {
            "seconds": dict(self._seconds),
            "cpu_seconds": dict(self._cpu_seconds),
            "interface": None if self.interface is None else self.interface.values(),
            "traffic": {
                phase: {
                    traffic.value: {
                        "messages": tally.messages,
                        "bytes": tally.num_bytes,
                        "dense_equivalent_bytes": tally.dense_equivalent_bytes,
                    }
                    for traffic, tally in counter.snapshot().items()
                }
                for phase, counter in self._counters.items()
            },
        }
