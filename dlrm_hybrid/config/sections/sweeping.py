"""What the keys of `sweep` mean together."""

from __future__ import annotations

from collections.abc import Iterator

from dlrm_hybrid.config.schema import Config

# A job of the sweep is one job of SLURM, and its script comes from here.
OF_THE_SWEEP = ("--array", "--wrap", "--parsable", "--output", "--open-mode", "--test-only")


def sweep_rules(config: Config) -> Iterator[str]:
    """Faults of how jobs are run, here or by SLURM."""
    sweep = config.sweep
    if sweep.submit is None:
        if sweep.sbatch:
            given = ", ".join(sweep.sbatch)
            yield f"sweep.sbatch = [{given}]: only applies to sweep.submit=slurm"
        return
    if sweep.jobs > 1:
        yield (
            f"sweep.jobs = {sweep.jobs}: only applies to jobs on this machine; SLURM decides how "
            "many run at one time"
        )
    for option in sweep.sbatch:
        if option.partition("=")[0] in OF_THE_SWEEP:
            yield f"sweep.sbatch = [{option}]: the sweep sets this itself for each job"
