"""`python -m dlrm_hybrid VERB [Hydra overrides]`."""

import os
import signal
import sys
from types import FrameType

from dlrm_hybrid import __version__
from dlrm_hybrid.types import ExitCode


def main() -> int:
    """Run the verb of the command line and return the exit code."""
    signal.signal(signal.SIGTERM, _leave)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # a shell's way for background jobs
        signal.signal(signal.SIGINT, _leave)
    # The parent of a sweep's job blocks these signals until the handlers are in place.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))
    from dlrm_hybrid.limits import lacks_trainer

    if sentence := lacks_trainer(" ".join(["dlrm_hybrid", *sys.argv[1:2]])):
        if "--version" in sys.argv[1:]:
            sys.stdout.write(f"dlrm_hybrid {__version__}\n")
            return ExitCode.DONE
        sys.stderr.write(f"{sentence}\n")
        return ExitCode.RESOURCES
    from dlrm_hybrid.cli.main import run  # a tenth of a second, more from a cold disk
    from dlrm_hybrid.output import harmless_output

    with harmless_output():
        code = run(sys.argv)
        for number in (signal.SIGTERM, signal.SIGINT):  # too late to change the exit code
            signal.signal(number, signal.SIG_IGN)
    return code


def _leave(number: int, frame: FrameType | None) -> None:
    """Exit on a signal that comes before the verb, which installs handlers of its own.

    There is nothing to clean up yet, and an exception raised during an import is often swallowed.
    """
    is_term = number == signal.SIGTERM
    before = " before training" if sys.argv[1:2] == ["train"] else ""
    text = f"stopped by SIGTERM{before}\n" if is_term else "stopped by Ctrl-C\n"
    os.write(2, text.encode())
    os._exit(ExitCode.of_signal(number))


if __name__ == "__main__":
    sys.exit(main())
