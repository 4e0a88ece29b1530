"""Kernels of a world, compiled before it begins; what is said of it goes to a log."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar, final

from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.compiling import compile_ahead
from dlrm_hybrid.run.display import Bar, Count

T = TypeVar("T")


def compile_kernels(config: Config) -> None:
    """Compile what the ranks of a world will call, unless that has been done on this machine."""
    compile_ahead(build.kernel_files(config, trains=True, has_rows=True), _QuietDisplay())


@final
class _QuietDisplay:
    """Lines go to the logger `dlrm_hybrid`: how they are shown is the program's business."""

    def line(self, text: str) -> None:
        """Log a line."""
        logging.getLogger("dlrm_hybrid").info(text)

    def line_once(self, text: str) -> None:
        """Log a line."""
        self.line(text)

    def bar(self, label: str, *, is_late: bool = False) -> AbstractContextManager[Bar]:
        """Nothing is drawn."""
        return _nothing(_NoBar())

    def counter(
        self, label: str, unit: str, *, is_late: bool = False
    ) -> AbstractContextManager[Count]:
        """Nothing is drawn."""
        return _nothing(_NoBar().count)


class _NoBar:
    def update(self, done: float, total: float | None, text: str) -> None:
        """Draw nothing."""

    def count(
        self, done: float, total: float | None, stage: str = "", unit: str | None = None
    ) -> None:
        """Draw nothing."""


@contextmanager
def _nothing(one: T) -> Generator[T, None, None]:
    yield one
