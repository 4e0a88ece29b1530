from pathlib import Path
from typing import Any

import parts
import pytest
from study_runs import study_run

from dlrm_hybrid.report.runs import Run
from dlrm_hybrid.types import ConfigError


def counted(name: str, **sent: int) -> Run:
    """A world of 100 samples that has sent so many bytes of each class."""
    network: dict[str, Any] = {
        "bytes_total": sum(sent.values()),
        "bytes_per_sample": sum(sent.values()) / 100,
        "by_class": {kind: {"bytes": num_bytes} for kind, num_bytes in sent.items()},
    }
    spans = {"compute": 0.001, "encode": 0.0001, "decode": 0.0002}
    roles = {str(rank): {"seconds_by_span": spans} for rank in range(2)}
    return named(study_run("dct", summary={"network": network, "roles": roles}), name)


def trained(name: str, seed: int, loss: float) -> Run:
    run = study_run("dct", seed=seed, summary={"test": {"loss": loss}})
    return named(run, f"{name}_{seed}")


def named(run: Run, name: str) -> Run:
    return Run(
        folder=Path("runs") / name,
        config=run.config,
        overrides=(),
        environment={},
        summary=run.summary,
        events=(),
    )


def test_a_part_stands_beside_the_first_run() -> None:
    worlds = [counted("none", gradient_push=4000, control=0), counted("dct", gradient_push=100)]
    losses = [("none", 0, 0.5), ("none", 1, 0.4), ("dct", 0, 0.51), ("dct", 1, 0.4)]
    shown = parts.table(worlds, [trained(*one) for one in losses])
    assert shown.columns == (
        *("bytes per sample", "gradient push", "control", "all", "fewer"),
        *("test log-loss, %", "seeds", "CPU µs", "codes"),
    )
    assert shown.rows == [
        ("none", "40.0", "0.0", "40.0", "1.0×", "–", "0", "20.0", "30.0%"),
        ("dct", "1.0", "0.0", "1.0", "40.0×", "+1.00 ± 1.41", "2", "20.0", "30.0%"),
    ]


def test_a_run_without_its_likes_is_named() -> None:
    worlds = [counted("none", gradient_push=4000), counted("dct", gradient_push=100)]
    with pytest.raises(ConfigError, match="dct_3: no run of none has its train.seed = 3"):
        parts.table(worlds, [trained("dct", 3, 0.5)])
    with pytest.raises(ConfigError, match="other_0: no run of --bytes is named 'other'"):
        parts.table(worlds, [trained("other", 0, 0.5)])
    silent = named(
        study_run("dct", summary={"network": {"bytes_per_sample": None, "bytes_total": None}}), "x"
    )
    with pytest.raises(ConfigError, match="x: no bytes were counted"):
        parts.table([silent], [])
