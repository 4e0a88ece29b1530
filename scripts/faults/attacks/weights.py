"""Attacks on weights and resuming: excessive rates, NaN in files, Ctrl-C, changed arithmetic."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch

from dlrm_hybrid.checkpoint import folder as checkpoint_folder
from dlrm_hybrid.checkpoint.manifest import manifest_text
from dlrm_hybrid.checkpoint.writer import write_tensors

from .base import SMALL, TIMEOUT_SECONDS, Attack, expect, program, start, wait, wait_gone

LONG = (*SMALL, "telemetry.every=1", "train.epochs=3", "hydra.run.dir=run")
PAPER = (*SMALL, "model=dlrm_paper", "checkpoint.every=7", "hydra.run.dir=run")
WORLD = ("parallel=hybrid", "parallel.world=in_process")
RATES = ("10", "1e2", "1e3", "1e4", "1e5")


def _diverges(*overrides: str) -> Callable[[Path], str]:
    """Train for 109 steps at a rate that no model survives."""

    def attack(folder: Path) -> str:
        ended = program(["train", *PAPER, *overrides], folder)
        root = folder / "run"
        expect(ended.code in (0, 4), f"exit code {ended.code}: {ended.errors}")
        status = json.loads((root / "summary.json").read_text())["status"]
        expect(status == ("complete" if ended.code == 0 else "diverged"), status)
        expect(ended.code == 0 or "may be too high" in ended.errors, ended.errors)
        _expect_finite(list(root.glob("checkpoints/*/*.safetensors")))
        return ended.errors.strip() or "every checkpoint is finite"

    return attack


def _expect_finite(files: Sequence[Path]) -> None:
    for file in files:
        tensors = cast(dict[str, torch.Tensor], cast(Any, safetensors.torch).load_file(file))
        for name, tensor in tensors.items():
            expect(bool(torch.isfinite(tensor).all()), f"{file}: {name}")


def _rates() -> list[Attack]:
    rows: dict[str, tuple[str, ...]] = {
        f"lr-{rate}-seed-{seed}-{precision}": (
            *(f"optimizer.lr={rate}", f"train.seed={seed}", f"precision={precision}"),
        )
        for rate in RATES
        for seed in range(3)
        for precision in ("float32", "bfloat16")
    }
    rows["embedding-lr-1e38"] = ("embedding.lr=1e38",)
    rows["hybrid-embedding-lr-1e38"] = (*WORLD, "embedding.lr=1e38")
    rows["hybrid-lr-1e3"] = (*WORLD, "optimizer.lr=1e3")
    rows["dct-lr-1e3"] = (*WORLD, "+experiment=dct_hybrid", "optimizer.lr=1e3")
    rows["world-lr-1e3"] = ("parallel=hybrid", "optimizer.lr=1e3")
    expected = "exit 4 with step and key, or finite; no checkpoint holds NaN"
    return [Attack(name, expected, _diverges(*overrides)) for name, overrides in rows.items()]


def _saved_nan(folder: Path) -> str:
    """A checkpoint with right checksums and one NaN."""
    program(["train", *SMALL, "train.steps=10", "hydra.run.dir=run"], folder)
    saved = checkpoint_folder.find(folder / "run")
    facts = dict(checkpoint_folder.read_facts(saved))
    path = saved / "dense.worker-0.safetensors"
    tensors = cast(dict[str, torch.Tensor], cast(Any, safetensors.torch).load_file(path))
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}  # the file is mapped
    tensors["top.1.weight"][0, 0] = float("nan")
    facts["files"][path.name] = asdict(write_tensors(path, tensors))
    (saved / "manifest.json").write_text(manifest_text(facts), encoding="utf-8")
    told = f"{path.name}: top.1.weight holds values that are not finite"
    for verb in (
        ["evaluate", "evaluate.checkpoint=run"],
        ["train", *SMALL, "checkpoint.resume=run", "hydra.run.dir=new"],
    ):
        ended = program(verb, folder)
        expect(ended.code == 3 and told in ended.errors, f"{ended.code}: {ended.errors}")
    return ended.errors.strip()


def _begin(folder: Path, *overrides: str) -> subprocess.Popen[bytes]:
    """A long run that has made its first steps."""
    run = start(["train", *LONG, *overrides], folder)
    record, until = folder / "run" / "events.jsonl", time.monotonic() + TIMEOUT_SECONDS
    while not (record.exists() and '"progress"' in record.read_text()):
        expect(time.monotonic() < until and run.poll() is None, "the run makes no step")
        time.sleep(0.05)
    return run


def _ctrl_c(folder: Path) -> str:
    run = _begin(folder)
    os.killpg(run.pid, signal.SIGINT)
    ended = wait(run, folder)
    expect(ended.code == 130, f"{ended.code}: {ended.errors}")
    step = json.loads((folder / "run" / "summary.json").read_text())["steps"]
    told = f"stopped by Ctrl-C; checkpoint saved at step {step:,}"
    expect(told in ended.errors, ended.errors)
    resumed = program(
        ["train", *LONG, "checkpoint.resume=auto"], folder, {"MKL_CBWR": "COMPATIBLE"}
    )
    expect(resumed.code == 0, resumed.errors)
    told = "no longer bit-identical to an uninterrupted run: MKL_CBWR not set → COMPATIBLE"
    expect(told in resumed.output, resumed.output)
    return ended.errors.splitlines()[0]


def _two_ctrl_c(folder: Path) -> str:
    run = _begin(folder)
    for _ in range(2):
        os.killpg(run.pid, signal.SIGINT)
        time.sleep(0.2)
    ended = wait(run, folder, seconds=10.0)
    expect(ended.code == 130, f"{ended.code}: {ended.errors}")
    return ended.errors.splitlines()[0]


def _old_weights_gone(folder: Path) -> str:
    """A run from old weights that is killed before it saves, and then has nothing to begin with."""
    program(["train", *SMALL, "train.steps=10", "hydra.run.dir=old"], folder)
    run = _begin(folder, "checkpoint.resume=old")
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    wait_gone(run.pid)
    shutil.rmtree(folder / "old")
    ended = program(["train", *LONG, "checkpoint.resume=auto"], folder)
    expect(ended.code == 3 and "has no checkpoint of its own" in ended.errors, ended.errors)
    return ended.errors.strip()


ATTACKS = (
    *_rates(),
    Attack("saved-nan", "exit 3, file and tensor", _saved_nan),
    Attack("ctrl-c", "exit 130 with a checkpoint; resumed: other arithmetic is said", _ctrl_c),
    Attack("two-ctrl-c", "exit 130 within seconds", _two_ctrl_c),
    Attack("old-weights-gone", "exit 3, never from step 0", _old_weights_gone),
)
