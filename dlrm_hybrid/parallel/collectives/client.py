"""A worker's side of collectives: contributes, and waits for the result."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar, final

from dlrm_hybrid.comm.mailbox import Receive
from dlrm_hybrid.compress.gradient.collective import Collective, Sections
from dlrm_hybrid.parallel.effects import Port, Program
from dlrm_hybrid.telemetry.spans import Span, SpanClock
from dlrm_hybrid.types import DlrmError
from dlrm_hybrid.wire.frame import Frame, Kind
from dlrm_hybrid.wire.section import SectionError

Result = TypeVar("Result")


@final
class CollectiveClient:
    """Runs the rounds of an encoding through the server of the worker's stage.

    Args:
        port: of the worker.
        clock: measures encoding.
    """

    def __init__(self, port: Port, clock: SpanClock) -> None:
        self._port = port
        self._encoding = clock.within(Span.ENCODE)

    def run(
        self, number: int, encoding: Generator[Collective, Sections, Result]
    ) -> Program[Result]:
        """What an encoding returns, after all of its rounds; without rounds it waits for nothing.

        Args:
            number: of the push.
            encoding: of `Compressor.encode`.

        Raises:
            DlrmError: a result is not what its operation gives; names rank, push and round.
            DivergedError: a gradient is not finite.
        """
        server: int | None = None
        round_ = 0
        result: Sections | None = None
        while True:
            try:
                with self._encoding:
                    collective = next(encoding) if result is None else encoding.send(result)
            except StopIteration as end:
                return end.value
            except SectionError as error:
                raise DlrmError(
                    f"{self._port}: result of rank {server} for push {number}, round {round_ - 1}: "
                    f"{error}"
                ) from error
            server = self._port.topology.collective_server(self._port.stage)
            self._port.send(server, Kind.CONTRIBUTION, number, collective.value, round_=round_)
            frame: Frame = yield Receive(Kind.RESULT, server, number, round=round_)
            result = frame.sections
            round_ += 1
