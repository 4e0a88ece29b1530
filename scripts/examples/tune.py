"""Tunes learning rate and sparsity with Optuna, a run for each trial; continues if repeated.

    pip install optuna
    python scripts/examples/tune.py runs/tuned 20 data=criteo_kaggle train.evaluate_every=500

Runs worse than the median of earlier ones are stopped early. Rows should have a validation part
(docs/table.md): a configuration that was chosen on test rows looks better than it is.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import optuna as _optuna  # pyright: ignore[reportMissingImports]

from dlrm_hybrid.types import ExitCode

optuna: Any = _optuna
folder, count, *overrides = Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
TRAIN = (sys.executable, "-m", "dlrm_hybrid", "train", "+experiment=dct_dp")


def evaluations(run: Path, process: subprocess.Popen[bytes]) -> Iterator[tuple[int, float]]:
    """Steps and log-losses that a run writes to `events.jsonl` until it ends."""
    seen = -1
    while process.poll() is None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        record = run / "events.jsonl"
        lines = record.read_bytes().splitlines(keepends=True) if record.exists() else []
        for event in (json.loads(line) for line in lines if line.endswith(b"\n")):
            if event["kind"] == "evaluated" and event["step"] > seen:
                seen = event["step"]
                yield seen, event["log_loss"]


def score(trial: Any) -> float:
    """The best log-loss of one configuration."""
    run = folder / str(trial.number)
    chosen = (
        f"optimizer.lr={trial.suggest_float('lr', 0.01, 1.0, log=True)}",
        f"gradient.density={trial.suggest_categorical('density', [0.1, 0.01, 0.001])}",
        f"hydra.run.dir={run}",
    )
    with subprocess.Popen([*TRAIN, *overrides, *chosen], stdout=subprocess.DEVNULL) as process:
        for step, log_loss in evaluations(run, process):
            trial.report(log_loss, step)
            if trial.should_prune():
                process.send_signal(signal.SIGINT)  # it saves a checkpoint and ends
                raise optuna.TrialPruned
    if process.returncode == ExitCode.DIVERGED:
        raise optuna.TrialPruned
    if process.returncode:
        raise SystemExit(f"{run}: exit code {process.returncode}")
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text("utf-8"))
    return summary["best"]["value"]


folder.mkdir(parents=True, exist_ok=True)
study: Any = optuna.create_study(
    study_name="tune",
    storage=f"sqlite:///{folder / 'study.db'}",
    load_if_exists=True,
    sampler=optuna.samplers.TPESampler(seed=0),
    pruner=optuna.pruners.MedianPruner(n_startup_trials=3),
)
study.optimize(score, n_trials=count)
best: Any = study.best_trial
print(f"best: log-loss {best.value:.4f} with {best.params}, {folder / str(best.number)}")
