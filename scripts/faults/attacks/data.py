"""Attacks on raw files, on prepared rows, and on their preparation."""

from __future__ import annotations

import gzip
import json
import os
import shlex
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import zstandard

from dlrm_hybrid.data.synthetic import generate
from dlrm_hybrid.run.assembly import build

from .base import SMALL, Attack, Ended, NotHereError, expect, program, start, wait

REAL = ("data=criteo_kaggle", "data.raw=train.txt", "data.prepared=rows", "data.processes=1")
MODEL = ("model=dlrm_small", "train.batch_size=64", "telemetry.tensorboard=false")
BOMB_BYTES = 1 << 30
MOST_BYTES = 600e6  # of memory; without a file at all it is a third of it
POLL_SECONDS = 0.005
DEADLINE_SECONDS = 60.0


def _raw(folder: Path, rows: int = 2000) -> Path:
    path = folder / "train.txt"
    generate(path, rows, 1, build.profile(), lambda done: None)
    return path


def _prepared(folder: Path) -> Path:
    """`train.txt`, prepared in `rows`."""
    raw = _raw(folder, rows=20_000)
    ended = program(["prepare", *REAL], folder)
    expect(ended.code == 0, ended.errors)
    return raw


def _refused(ended: Ended, code: int, text: str) -> str:
    expect(ended.code == code, f"exit code {ended.code}: {ended.errors[-300:]}")
    expect(text in ended.errors, ended.errors[-300:])
    return ended.errors.strip().splitlines()[0]


def _flip_label(path: Path, at: int) -> None:
    """Another label in the first row after byte `at`, nothing else, and the old time of change."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        file.readline()
        row = file.tell()
        label = file.read(1)
        file.seek(row)
        file.write(b"0" if label == b"1" else b"1")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _middle_changed(folder: Path) -> str:
    raw = _prepared(folder)
    _flip_label(raw, raw.stat().st_size // 2)
    return _refused(program(["train", *REAL, *MODEL], folder), 3, "has changed since it was")


def _changed_while_read(folder: Path, change: Callable[[Path], None]) -> str:
    raw = _raw(folder, rows=400_000)
    one = start(["prepare", *REAL], folder)
    until = time.monotonic() + DEADLINE_SECONDS
    while not list(folder.glob("rows.partial/spill-*/1.bin")):
        expect(one.poll() is None and time.monotonic() < until, "prepare never began to read")
        time.sleep(POLL_SECONDS)
    change(raw)
    seen = _refused(wait(one, folder), 3, "changed while it was read")
    expect(
        {path.name for path in folder.iterdir()} == {"train.txt", "stdout", "stderr"}, "leftover"
    )
    return seen


def _cut(raw: Path) -> None:
    with raw.open("rb") as file:
        file.seek(raw.stat().st_size * 2 // 3)
        file.readline()
        end = file.tell()
    os.truncate(raw, end)


def _two_at_once(folder: Path) -> str:
    command = ["prepare", *SMALL, "data.rows=300000"]
    ends: list[Ended] = []
    folders = [folder / name for name in ("one", "two")]
    for one in folders:
        one.mkdir()
    here = f"data.prepared={folder / 'rows'}"
    runs = [start([*command, here], one) for one in folders]
    for run, one in zip(runs, folders, strict=True):
        ends.append(wait(run, one))
    expect([end.code for end in ends] == [0, 0], "".join(end.errors for end in ends))
    waited = [end for end in ends if "is preparing these rows; waiting for it" in end.output]
    expect(len(waited) == 1, "nobody waited")
    return next(line for line in waited[0].output.splitlines() if "waiting" in line)


def _bomb(folder: Path, suffix: str) -> str:
    pack = zstandard.ZstdCompressor().compress if suffix == "zst" else gzip.compress
    raw = folder / f"train.txt.{suffix}"
    raw.write_bytes(pack(bytes(BOMB_BYTES)))
    one = start(["prepare", *REAL, f"data.raw={raw.name}"], folder)
    peak_bytes = 0
    while one.poll() is None:
        try:
            used = psutil.Process(one.pid).memory_info().rss
        except psutil.NoSuchProcess:
            break
        peak_bytes = max(peak_bytes, used)
        time.sleep(POLL_SECONDS)
    seen = _refused(wait(one, folder), 3, "line longer than")
    expect(peak_bytes < MOST_BYTES, f"{peak_bytes / 1e6:.0f} MB of memory")
    return f"{raw.stat().st_size:,} bytes: {seen}; {peak_bytes / 1e6:.0f} MB of memory"


def _repetitive(folder: Path) -> str:
    """Text of 56 times its compressed size: each piece of it is more than one read."""
    filler = "x" * 28
    rows = "".join(f"{n % 2},{n % 97},{filler}{n % 9}\n" for n in range(300_000))
    (folder / "rows.csv.zst").write_bytes(zstandard.compress(f"y,a,b\n{rows}".encode(), 3))
    parts = "split: {by: fraction, validation: 0.1, test: 0.1, seed: 0}"
    schema = (
        f"label: y\ndense: []\ncategorical: [{{name: a, kind: integer}}, {{name: b}}]\n{parts}\n"
    )
    (folder / "schema.yaml").write_text(schema, encoding="utf-8")
    given = ("data=table", "data.schema=schema.yaml", "data.raw=rows.csv.zst")
    ended = program(["prepare", *given], folder)
    expect(ended.code == 0 and "300,000" in ended.output, ended.output + ended.errors)
    return "300,000 rows"


def _wide_window(folder: Path) -> str:
    parameters = zstandard.ZstdCompressionParameters(window_log=30)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    text = _raw(folder).read_bytes()
    (folder / "train.txt.zst").write_bytes(stream.compress(text) + stream.flush())
    ended = program(["prepare", *REAL, "data.raw=train.txt.zst"], folder)
    return _refused(ended, 3, "its window is larger than")


def _bit_flipped(folder: Path) -> str:
    _prepared(folder)
    shard = folder / "rows" / "ids.npy"
    content = np.fromfile(shard, np.uint8)
    content[len(content) // 2] ^= 4
    shard.write_bytes(content.tobytes())
    _refused(program(["prepare", *REAL, "prepare.check=true"], folder), 3, "checksum differs")
    return _refused(program(["train", *REAL, *MODEL], folder), 3, "checksum differs")


def _lying_manifest(folder: Path) -> str:
    _prepared(folder)
    path = folder / "rows" / "manifest.json"
    values = json.loads(path.read_text())
    values["arrays"][2]["file"] = "../../../etc/passwd"
    path.write_text(json.dumps(values))
    ended = program(["train", *REAL[:1], *REAL[2:], *MODEL], folder)
    return _refused(
        ended, 3, "arrays: lists ['label.npy', 'dense.npy', '../../../etc/passwd'] instead of"
    )


def _full_disk(folder: Path) -> str:
    if os.geteuid() != 0:
        raise NotHereError("only root can mount a small disk")
    disk = folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        raise NotHereError("cannot mount a small disk")
    try:
        row = b"1" + 13 * b"\t" + 26 * b"\t" + b"\n"
        (folder / "train.txt.gz").write_bytes(gzip.compress(row * 100_000))
        given = ("data.raw=train.txt.gz", "data.prepared=disk/rows")
        ended = program(["prepare", *REAL, *given], folder)
        seen = _refused(ended, 5, "data.prepared")
        expect(list(disk.iterdir()) == [], f"left: {list(disk.iterdir())}")
        return seen
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def _too_late(folder: Path, override: str, code: int) -> str:
    ready = program(["prepare", *SMALL], folder)
    expect(ready.code == 0, ready.errors)
    since = time.monotonic()
    ended = program(["train", *SMALL, override], folder)
    seconds = time.monotonic() - since
    expect(ended.code == code, f"exit code {ended.code}: {ended.errors[-300:]}")
    expect(not list(folder.glob("runs/*/*")), "an empty run folder is left")
    return f"{ended.errors.strip().splitlines()[0]} ({seconds:.1f} s)"


def _circle(folder: Path) -> str:
    _prepared(folder)
    ended = program(["train", *REAL, *MODEL, "data.min_count=2", "train.steps=2"], folder)
    expect(ended.code == 3, f"exit code {ended.code}")
    advised = ended.errors.strip().splitlines()[-1]
    again = program(shlex.split(advised)[3:], folder)
    expect(again.code == 0, again.errors)
    return advised.strip()


ATTACKS = (
    Attack("raw-middle-changed", "exit 3, whatever its time of change says", _middle_changed),
    Attack("raw-cut-while-read", "exit 3, nothing left", partial(_changed_while_read, change=_cut)),
    Attack(
        "raw-rewritten-while-read",
        "exit 3, nothing left",
        partial(_changed_while_read, change=lambda raw: _flip_label(raw, 4_000_000)),
    ),
    Attack("synthetic-twice-at-once", "the second waits, both exit 0", _two_at_once),
    Attack("zst-bomb", "exit 3 in bounded memory", partial(_bomb, suffix="zst")),
    Attack("gz-bomb", "exit 3 in bounded memory", partial(_bomb, suffix="gz")),
    Attack("zst-of-repetitive-rows", "all rows", _repetitive),
    Attack("zst-window", "exit 3, what to do", _wide_window),
    Attack("shard-bit-flipped", "exit 3, the rows", _bit_flipped),
    Attack("rows-manifest-lies", "exit 3, the field", _lying_manifest),
    Attack("disk-full-in-prepare", "exit 5, nothing half made", _full_disk),
    Attack(
        "batch-larger-than-rows",
        "exit 2 at once, no run folder",
        partial(_too_late, override="train.batch_size=7000", code=2),
    ),
    Attack(
        "resume-from-nowhere",
        "exit 3 at once, no run folder",
        partial(_too_late, override="checkpoint.resume=nope", code=3),
    ),
    Attack("prepare-train-circle", "the command of the message works", _circle),
)
