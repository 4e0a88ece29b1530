# ---
# jupyter:
#   jupytext:
#     formats: py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Compare runs
#
# Any runs: a sweep's folder, two folders of your own. This is what `python -m dlrm_hybrid report`
# puts into one HTML file, piece by piece, and then as pandas frames for questions of your own.

# %% [markdown]
# With no folder named, a small sweep is made here: three worlds of three processes (a minute).

# %% tags=["parameters"]
FOLDERS = []

# %%
import subprocess
import sys
from pathlib import Path

import dlrm_hybrid
from dlrm_hybrid.report import figures, measures, tables
from dlrm_hybrid.report.labels import labels
from dlrm_hybrid.report.runs import read_runs
from dlrm_hybrid.telemetry.events import Kind

sys.path.append(str(Path(dlrm_hybrid.__file__).parents[1] / "scripts" / "studies"))
from show import show

if not FOLDERS:
    FOLDERS = ["runs/notebooks/sweep"]
    command = (
        f"{sys.executable} -m dlrm_hybrid train -m +experiment=dct_dp parallel.cuts=[] "
        "model=dlrm_small data.rows=60000 gradient.density=0.1,0.01,0.001 telemetry.every=20 "
        f"train.evaluate_every=100 hydra.sweep.dir={FOLDERS[0]} skip_completed=true"
    )
    subprocess.run(command.split(), check=True, capture_output=True)

# %% [markdown]
# A label is what tells a run from the others: its name, what was swept, or its folder. Its colour
# stays the same in all pictures.

# %%
runs = read_runs([Path(folder) for folder in FOLDERS])
names = labels(runs)
show(tables.comparison(runs, names), figures.quality(runs, names))

# %% [markdown]
# What makes them different:

# %%
show(tables.differences(runs, names))

# %% [markdown]
# Loss against steps, training time and bytes sent. Only worlds of processes count their bytes.

# %%
show(figures.losses(runs, names))

# %% [markdown]
# How much was sent, and where the threshold lay:

# %%
show(figures.compressed(runs, names))

# %% [markdown]
# ## Questions of your own
#
# `measures.frame` has a row for each run with every figure of the table above, unrounded;
# `measures.points` a row for each event of a kind: `progress` (loss, time), `evaluated`
# (test scores), `compression`, `saved`.

# %%
measures.frame(runs)

# %%
points = measures.points(runs, Kind.EVALUATED)
points.pivot(index="step", columns="run", values="log_loss")

# %% [markdown]
# The first step at which each run was within 1 % of the best test log-loss of all:

# %%
points[points["log_loss"] < 1.01 * points["log_loss"].min()].groupby("run")["step"].min()
