"""What of Hydra the command line may not use: whatever could run code of somebody else.

Hydra makes objects of what `hydra.launcher`, `hydra.sweeper` and `hydra.callbacks` name, unpickles
the file of a flag, and reads configurations from folders that other flags name.
"""

from __future__ import annotations

import re
from argparse import Namespace

ALLOWED = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweeper.params")
FLAGS = ("config_path", "config_name", "config_dir", "experimental_rerun")
_HYDRA = re.compile(r"[^=]*(?<![\w.-])hydra(?![\w-])[^=]*")


def flag_faults(parsed: Namespace) -> list[str]:
    """One line for each flag that is refused.

    Args:
        parsed: the command line, taken apart by Hydra's own parser.
    """
    return [
        f"--{flag.replace('_', '-')}: is not for use here; a run is configured by conf/ and by "
        "overrides"
        for flag in FLAGS
        if getattr(parsed, flag) is not None
    ]


def override_fault(override: str) -> str | None:
    """What is wrong with an override that means Hydra itself, if anything."""
    found = _HYDRA.match(override)
    if found is None or found[0].rstrip() in ALLOWED:
        return None
    return f"{found[0]}: of Hydra's own keys only {', '.join(ALLOWED)} may be set"
