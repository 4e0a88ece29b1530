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
# # Where the time goes: network and CPU
#
# The DCT paper's second half is a measurement: on its cluster, compression took the network from
# 94.2 % busy to 49.3 %, the CPUs from 48.7 % to 91.1 %, and training needed 37 % less time. The
# story behind it: **a processor that waits for bytes does no work**. Send fewer bytes, and the same
# processors have less to wait for; encoding and decoding is work of its own, though, and must
# cost less than the waiting it saves.
#
# Four runs tell it apart, the same world of processes (trainers × stages, and a server) each time:
#
# | run | gradients and weights | activations |
# |---|---|---|
# | `baseline` | whole | whole |
# | `dct_dp` | 1 % | whole |
# | `dct_mp` | whole | 10 % |
# | `dct_hybrid` | 1 % | 10 % |

# %% [markdown]
# Folders of such runs; with none, short ones are made here. On loopback bytes cost next to nothing.
# With root, or user namespaces, `NETWORK = "network=emulated network.rate=100mbit"` gives each rank
# a link of its own, shaped to that rate (`python -m dlrm_hybrid doctor` says whether it can).

# %% tags=["parameters"]
FOLDERS = []
NETWORK = "network=host"

# %%
import subprocess
import sys
from pathlib import Path

import dlrm_hybrid
from dlrm_hybrid.report import figures, measures, tables
from dlrm_hybrid.report.labels import labels
from dlrm_hybrid.report.runs import read_runs

sys.path.append(str(Path(dlrm_hybrid.__file__).parents[1] / "scripts" / "studies"))
import traffic
from show import show

if not FOLDERS:
    FOLDERS = ["runs/notebooks/network"]
    command = (
        f"{sys.executable} -m dlrm_hybrid train -m +experiment=baseline,dct_dp,dct_mp,dct_hybrid "
        f"data.rows=60000 train.steps=100 {NETWORK} hydra.sweep.dir={FOLDERS[0]} "
        "skip_completed=true"
    )
    subprocess.run(command.split(), check=True, capture_output=True)
runs = read_runs([Path(folder) for folder in FOLDERS])
names = labels(runs)

# %% [markdown]
# ## The result first
#
# Samples per second, and how busy links and processors were. The use of a link is its busier
# direction's share of the rate, on the busiest link; it is unknown on loopback, which has none.

# %%
frame = measures.frame(runs)
frame[["samples_per_second", "bytes_per_sample", "network_utilization", "cpu_utilization"]]

# %%
speed = frame["samples_per_second"]
(speed / speed.iloc[0]).rename("times the first run's speed").to_frame().round(2)

# %% [markdown]
# ## Bytes
#
# Two things travel in bulk while nothing is compressed: gradients to the server, weights back. That
# is why `dct_dp` alone saves most, and why activations count only once it is on.

# %%
show(traffic.against_first(runs, names), traffic.figure(runs, names))

# %% [markdown]
# ## What each role does all the time
#
# Wall time of each role, for one sample of the whole world. All bars of a run are equally long: who
# does not work waits. A shorter bar is a faster run. Compression trades `wait` for `encode` and
# `decode`.

# %%
show(tables.spans(runs, names), figures.time_by_span(runs, names))

# %% [markdown]
# ## Over time
#
# Is the link busy all along, or in bursts?

# %%
show(figures.usage(runs, names))

# %% [markdown]
# CPU time by role: compression moves work to whoever encodes and decodes.

# %%
show(tables.roles(runs, names), figures.cpu(runs, names))

# %% [markdown]
# The ranks of one run, each on its own:

# %%
show(figures.usage(runs[:1], names[:1]))
