"""`python -m dlrm_hybrid VERB [Hydra overrides]`."""

import signal
import sys
from types import FrameType

from dlrm_hybrid.types import ExitCode


def main() -> int:
    """Run the verb of the command line; returns the exit code."""
    signal.signal(signal.SIGTERM, _leave)
    try:
        from dlrm_hybrid.cli.main import run  # a tenth of a second, more from a cold disk
    except KeyboardInterrupt:
        sys.stderr.write("stopped by Ctrl-C\n")
        return ExitCode.INTERRUPTED
    code = run(sys.argv)
    for number in (signal.SIGTERM, signal.SIGINT):  # all is done, and the code says how it went
        signal.signal(number, signal.SIG_IGN)
    return code


def _leave(number: int, frame: FrameType | None) -> None:
    """SIGTERM before the verb, which has its own way to stop."""
    sys.stderr.write("stopped by SIGTERM before training\n")
    sys.exit(ExitCode.PREEMPTED)


if __name__ == "__main__":
    sys.exit(main())
