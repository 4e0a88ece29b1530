"""`python -m dlrm_hybrid VERB [Hydra overrides]`."""

import sys

from dlrm_hybrid.cli.main import run


def main() -> int:
    """Run the verb of the command line; returns the exit code."""
    return run(sys.argv)


if __name__ == "__main__":
    sys.exit(main())
