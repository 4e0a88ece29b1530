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
# # Thresholds and sparsity
#
# "Send the largest 1 %" means finding a threshold. Finding the exact one is a selection over all
# elements in every step, which costs more than it saves. The DCT paper's idea: **thresholds hardly
# move from step to step**, so find one, keep it for a life-span of steps, and let error feedback
# take care of the difference. Its figure 2 shows that for gradients. Figure 5 shows something else:
# that activations become *sparser* when they are trained with DCT-MP.

# %% [markdown]
# Folders of runs for each figure; with none, small ones are trained (a minute or two).
#
# * `GRADIENTS`: `gradient=dct gradient.threshold=exact gradient.lifespan=1 gradient.renewal=fixed`,
#   so that the threshold of a step is the one of its own top-k.
# * `ACTIVATIONS`: `activation=dct`, beside it `activation=none` with `activation.observe`, which
#   measures what the threshold would be and applies nothing.

# %% tags=["parameters"]
GRADIENTS = []
ACTIVATIONS = []

# %%
import subprocess
import sys
from pathlib import Path

import dlrm_hybrid
from dlrm_hybrid.report.figures import compressed
from dlrm_hybrid.report.labels import labels
from dlrm_hybrid.report.runs import read_runs

sys.path.append(str(Path(dlrm_hybrid.__file__).parents[1] / "scripts" / "studies"))
from show import show
from thresholds import figure, steadiness, threshold_names, thresholds

TRAIN = (
    f"{sys.executable} -m dlrm_hybrid train -m model=dlrm_small data.rows=120000 "
    "parallel.world=in_process parallel.trainers=1 optimizer.schedule=linear telemetry.every=1 "
    "skip_completed=true hydra.sweep.dir=runs/notebooks/thresholds"
)
EXACT = "gradient.threshold=exact gradient.lifespan=1 gradient.renewal=fixed"
if not GRADIENTS:
    command = f"{TRAIN}/dp +experiment=dct_dp parallel.cuts=[] {EXACT} gradient.density=0.25,0.05"
    subprocess.run(command.split(), check=True, capture_output=True)
    GRADIENTS = ["runs/notebooks/thresholds/dp"]
if not ACTIVATIONS:
    cut = "parallel.cuts=[bottom.2] parallel.servers=0"
    applied = f"{TRAIN}/mp +experiment=dct_mp {cut} activation.sparsity=0.75,0.9"
    measured = f"{TRAIN}/none +experiment=baseline {cut} activation.observe=0.75,0.9"
    for command in (applied, measured):
        subprocess.run(command.split(), check=True, capture_output=True)
    ACTIVATIONS = ["runs/notebooks/thresholds/mp", "runs/notebooks/thresholds/none"]

# %% [markdown]
# ## Figure 2: gradients
#
# Each line is one run, the threshold of every step's own top-k. Lines that are level say that an
# old threshold is as good as a new one. The table says how level: the distance of a threshold from
# the mean of the 100 before it.

# %%
runs = read_runs([Path(folder) for folder in GRADIENTS])
names = threshold_names(runs)
names

# %%
largest = "gradient.top.1.weight"
found = thresholds(runs, largest)
show(figure([found]), steadiness(found))

# %% [markdown]
# The largest layer is the calmest. Smaller layers are moved by single batches:

# %%
show(
    steadiness([one for name in names if name.endswith("weight") for one in thresholds(runs, name)])
)

# %% [markdown]
# ## Figure 5: activations
#
# Solid: trained with DCT-MP. Dashed: trained without, and only measured. Where the solid line falls
# below the dashed one of its colour, the model has learned to need fewer of its activations.

# %%
runs = read_runs([Path(folder) for folder in ACTIVATIONS])
found = [thresholds(runs, name) for name in threshold_names(runs)]
show(figure(found), steadiness([one for panel in found for one in panel]))

# %% [markdown]
# What left for the wire, as the report draws it:

# %%
show(list(compressed(runs, labels(runs))))
