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
# # The tables of the DCT paper, from runs
#
# Gupta et al., *Training Recommender Systems at Scale* (KDD 2021), drop most of what a
# hybrid-parallel DLRM sends and ask what that costs in quality:
#
# * **DCT-DP** (table 2) sends the largest elements of each dense gradient and keeps the rest for
#   later (error feedback).
# * **DCT-MP** (table 1) sends the largest activations of each row across a cut of the model, and
#   only their gradients back. What is dropped there is gone.
# * Table 3 does both.
#
# What counts is the difference to the same training without compression. Seeds differ by more than
# most compressions do, so each run is held against the baseline *of its own seed*.

# %% [markdown]
# Name folders of runs, or folders above them. With none, the next cell trains small ones, which
# takes a minute or two and shows how it is done, not what the paper shows:
# [docs/results/paper_tables.md](../docs/results/paper_tables.md) has runs that are long enough.

# %% tags=["parameters"]
FOLDERS = []

# %%
import subprocess
import sys
from pathlib import Path

from IPython.display import display

import dlrm_hybrid
from dlrm_hybrid.report.runs import read_runs

sys.path.append(str(Path(dlrm_hybrid.__file__).parents[1] / "scripts" / "studies"))
from paper_tables import paper_runs, settings
from show import show

TRAIN = (
    f"{sys.executable} -m dlrm_hybrid train -m model=dlrm_small data.rows=60000 train.seed=0,1 "
    "skip_completed=true hydra.sweep.dir=runs/notebooks/paper/table"
)
if not FOLDERS:
    mp = f"{TRAIN}1 +experiment=paper_table1 parallel.cuts=[bottom.2] activation.sparsity=0.0,0.9"
    dp = f"{TRAIN}2 +experiment=paper_table2 gradient.density=1,0.02"
    for command in (mp, dp):
        subprocess.run(command.split(), check=True, capture_output=True)
    FOLDERS = ["runs/notebooks/paper"]

# %% [markdown]
# A run finds its baseline by configuration: a sparsity of 0 is one, bit for bit, and so is
# `+experiment=baseline`, in whatever folder it lies. Rows are compressions, the runs of a row its
# seeds: mean ± standard deviation. "Against baseline" is the mean of the differences in test
# log-loss, not the difference of the means. The last columns are the paper's own figures, for its
# 39 million rows.

# %%
found = settings(paper_runs(read_runs([Path(folder) for folder in FOLDERS])))
for setting in found:
    display(show(setting.words, *(part for table in setting.tables.items() for part in table)))

# %% [markdown]
# What to look for: DCT-DP stays within the spread of its seeds far beyond 90 %, because error
# feedback sends later what it holds back now. DCT-MP has no such memory and costs more, most of it
# early in training: how that gap closes, `scripts/studies/gap.py` draws.
