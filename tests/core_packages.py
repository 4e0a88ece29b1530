"""The packages that a user has who installs no extra: what `dlrm-hybrid` alone requires."""

import re
from collections.abc import Iterator, Sequence
from importlib import metadata

CORE = ("torch", "numpy", "numba")
_NAME = re.compile(r"[A-Za-z0-9._-]+")


def required(names: Sequence[str] = CORE) -> dict[str, metadata.Distribution]:
    """Installed distributions that these need, themselves among them, by normal name.

    What they need for an extra, or on other machines, is not installed or does no harm.
    """
    found: dict[str, metadata.Distribution] = {}
    waiting = [*names]
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # for another machine
        waiting += _requirements(found[name])
    return found


def modules(distributions: dict[str, metadata.Distribution]) -> set[str]:
    """The names that these distributions install for `import`."""
    owners = metadata.packages_distributions()
    return {
        module
        for module, names in owners.items()
        if {re.sub(r"[-_.]+", "-", name).lower() for name in names} & distributions.keys()
    }


def _requirements(distribution: metadata.Distribution) -> Iterator[str]:
    for line in distribution.requires or ():
        name = _NAME.match(line)
        if name is not None and "extra ==" not in line:
            yield name[0]
