"""Tunes learning rate and sparsity with Optuna, a run for each trial; continues if repeated.

    pip install optuna
    python scripts/examples/tune.py runs/tuned 20 data=criteo_kaggle train.evaluate_every=500

Runs worse than the median of earlier ones are stopped early. Rows should have a validation part
(docs/table.md): a configuration that was chosen on test rows looks better than it is.
"""

import sys
from pathlib import Path
from typing import Any

import optuna as _optuna  # pyright: ignore[reportMissingImports]

from dlrm_hybrid import objective
from dlrm_hybrid.types import ExitCode, RunFailedError

optuna: Any = _optuna
folder, count, *overrides = Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]


def score(trial: Any) -> float:
    """The log-loss of one configuration."""
    chosen = [
        f"optimizer.lr={trial.suggest_float('lr', 0.01, 1.0, log=True)}",
        f"gradient.density={trial.suggest_categorical('density', [0.1, 0.01, 0.001])}",
        f"hydra.run.dir={folder / str(trial.number)}",
    ]

    def report(step: int, log_loss: float) -> None:
        trial.report(log_loss, step)
        if trial.should_prune():
            raise optuna.TrialPruned

    try:
        return objective(["+experiment=dct_dp", *overrides, *chosen], report=report)
    except RunFailedError as error:
        if error.exit_code == ExitCode.DIVERGED:
            raise optuna.TrialPruned from error
        raise


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
