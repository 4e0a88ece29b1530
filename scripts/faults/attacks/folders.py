"""Attacks by the content of folders: two programs in one, files of somebody else."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from dlrm_hybrid.checkpoint.manifest import manifest_text

from .base import SMALL, TIMEOUT_SECONDS, Attack, Ended, expect, program, start, wait

ROUNDS = 5
RUN = "hydra.run.dir=run"
STEPS = ("train.steps=20", "checkpoint.every=5", "checkpoint.keep=9")
LATEST = "run/checkpoints/latest"
NEWEST = "run/checkpoints/step_00000020"
Values = dict[str, Any]


def _train(folder: Path, *given: str) -> Ended:
    return program(["train", *SMALL, RUN, *given], folder)


def _trained(folder: Path) -> None:
    """A run of 20 steps in `run` and its rows; trained once for all attacks."""
    base = folder.parent / ".trained"
    if not base.exists():
        training = base.with_name(".training")
        training.mkdir()
        ended = _train(training, *STEPS)
        expect(ended.code == 0, ended.errors)
        training.rename(base)
    shutil.copytree(base, folder, dirs_exist_ok=True)


def _evaluate(folder: Path, *given: str) -> Ended:
    return program(["evaluate", "evaluate.checkpoint=run", *given], folder)


def _last(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else "nothing"


def _both(folder: Path, arguments: list[str]) -> tuple[Ended, Ended, list[int]]:
    """Two programs with these arguments, started at once in one folder."""
    places = [folder / name for name in ("one", "two")]
    for place in places:
        place.mkdir(exist_ok=True)
    both = [start(arguments, place) for place in places]
    one, two = (wait(x, place) for x, place in zip(both, places, strict=True))
    return one, two, [x.pid for x in both]


def _one_wins(one: Ended, two: Ended, pids: list[int]) -> None:
    codes = sorted((one.code, two.code))
    expect(codes == [0, 2], f"exit codes {codes}: {one.errors} {two.errors}")
    winner, loser = (0, two) if one.code == 0 else (1, one)
    holder = f"in use by process {pids[winner]} on {socket.gethostname()}"
    told = holder in loser.errors or "is not empty" in loser.errors or "complete" in loser.errors
    expect(told, loser.errors)


def _two_runs(resume: str, folder: Path) -> str:
    for number in range(ROUNDS):
        run = f"hydra.run.dir={folder / str(number)}"
        rows = f"data.prepared={folder / 'rows'}"
        if number == 0:
            expect(program(["prepare", *SMALL, rows], folder).code == 0, "prepare")
        given = ["train", *SMALL, rows, run, "train.steps=20", f"checkpoint.resume={resume}"]
        _one_wins(*_both(folder, given))
    return f"{ROUNDS} times one of two went on"


def _two_sweeps(folder: Path) -> str:
    _trained(folder)
    sweep = [f"hydra.sweep.dir={folder / 'sweep'}", "train.seed=1,2", "train.steps=5"]
    rows = f"data.prepared={folder / 'rows'}"
    expect(program(["prepare", *SMALL, rows], folder).code == 0, "prepare")
    _one_wins(*_both(folder, ["train", "-m", *SMALL, rows, *sweep]))
    return "one of two went on"


def _killed_holder(folder: Path) -> str:
    running = start(["train", *SMALL, RUN, "checkpoint.every=5"], folder)
    lock = folder / "run" / ".lock"
    until = time.monotonic() + TIMEOUT_SECONDS
    while not (lock.exists() and lock.read_text()) and time.monotonic() < until:
        time.sleep(0.01)
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    expect(lock.exists(), "the lock file was to be left behind")
    ended = _train(folder, "checkpoint.every=5", "checkpoint.resume=auto")
    expect(ended.code == 0, ended.errors)
    return "the next run took the folder over"


def _two_outputs(folder: Path) -> str:
    _trained(folder)
    given = [f"evaluate.checkpoint={folder / 'run'}", f"evaluate.output={folder / 'scores.json'}"]
    given += [f"data.prepared={_rows(folder)}"]
    one, two, pids = _both(folder, ["evaluate", *given])
    codes = {one.code, two.code}
    expect(codes <= {0, 2} and 0 in codes, f"{one.errors} {two.errors}")
    json.loads((folder / "scores.json").read_text(encoding="utf-8"))
    return f"exit codes {one.code} and {two.code} of {pids}"


def _rows(folder: Path) -> Path:
    return next((folder / "data" / "prepared").iterdir())


def _forge(folder: Path, change: Callable[[Values], object]) -> None:
    path = folder / NEWEST / "manifest.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    del values["format"], values["xxh3"]
    change(values)
    path.write_text(manifest_text(values), encoding="utf-8")


def _tensor(values: Values) -> Values:
    return next(iter(values["tensors"].values()))


def _lie(change: Callable[[Values], object], field: str, folder: Path) -> str:
    _trained(folder)
    _forge(folder, change)
    ended = _evaluate(folder)
    expect(ended.code == 3, f"exit code {ended.code}: {ended.errors}")
    expect("manifest.json: " in ended.errors and field in ended.errors, ended.errors)
    expect("\x1b" not in ended.errors, "an escape came through")
    return _last(ended.errors)


LIES: dict[str, tuple[Callable[[Values], object], str]] = {
    "file-above": (lambda v: _tensor(v)["parts"][0].update(file="../../x"), ".file"),
    "file-absolute": (lambda v: _tensor(v)["parts"][0].update(file="/etc/passwd"), ".file"),
    "file-with-escape": (lambda v: v["files"].update({"\x1b[2J": {}}), "files"),
    "part-below-zero": (lambda v: _tensor(v)["parts"][0].update(begin=[-1, 0]), ".begin"),
    "part-twice": (lambda v: _tensor(v)["parts"].append(_tensor(v)["parts"][0]), ".parts"),
    "part-missing": (lambda v: _tensor(v)["parts"].clear(), ".parts"),
    "step-below-zero": (lambda v: v.update(step=-1), "step"),
    "step-huge": (lambda v: v.update(step=10**40), "step"),
    "step-of-another": (lambda v: v.update(step=19), "step"),
    "dtype-unknown": (lambda v: _tensor(v).update(dtype="X8"), ".dtype"),
    "config-no-object": (lambda v: v.update(config=7), "config"),
    "config-of-nonsense": (lambda v: v["config"].update(model=None), "config"),
}


def _rows_elsewhere(folder: Path) -> str:
    _trained(folder)
    target = folder / "not" / "mine"
    _forge(folder, lambda values: values["config"]["data"].update(prepared=str(target)))
    ended = _evaluate(folder)
    expect(ended.code == 0, ended.errors)
    expect(not target.parent.exists(), "rows were written where the checkpoint says")
    return "scored on rows in the default folder"


def _tables_elsewhere(folder: Path) -> str:
    _trained(folder)
    target = folder / "not" / "mine"
    tables = {"storage": "mmap", "folder": str(target)}
    _forge(folder, lambda values: values["config"]["embedding"].update(tables))
    ended = _evaluate(folder)
    expect(ended.code in (0, 3), f"exit code {ended.code}: {ended.errors}")
    expect(not target.parent.exists(), "tables were made where the checkpoint says")
    return f"exit code {ended.code}, nothing made"


def _way_out(place: str, code: int, command: tuple[str, ...], folder: Path) -> str:
    """A link in a run folder that leads to somebody's own file or folder."""
    _trained(folder)
    own = folder / "own"
    path = folder / "run" / place
    if path.is_dir():
        shutil.move(path, own)
    else:
        own.write_text("mine", encoding="utf-8")
    path.unlink(missing_ok=True)
    path.symlink_to(own)
    before = _content(own)
    rows = [f"data.prepared={_rows(folder)}"] if command == RESUME else []
    ended = program([*command, *rows], folder)
    expect(ended.code == code, f"exit code {ended.code}: {ended.errors}")
    expect(_content(own) == before, "written through the link")
    return f"exit code {ended.code} {_last(ended.errors)}"


def _content(path: Path) -> dict[str, bytes]:
    files = path.rglob("*") if path.is_dir() else [path]
    return {str(one): one.read_bytes() for one in files if one.is_file()}


def _odd_name(folder: Path) -> str:
    _trained(folder)
    path = folder / "run" / "config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    name = "<script>x</script>[y](javascript:z)"
    path.write_text(json.dumps({**values, "name": name}), encoding="utf-8")
    ended = program(["report", "report.runs=run"], folder)
    expect(ended.code == 0, ended.errors)
    texts = [(folder / f"report.{one}").read_text(encoding="utf-8") for one in ("html", "md")]
    expect(not any("<script>x" in text for text in texts), "a name is HTML")
    expect("](java" not in texts[1], "a name is a link")
    return "shown as it is"


def _no_file(folder: Path) -> str:
    _trained(folder)
    os.mkfifo(folder / "pipe")
    ended = _evaluate(folder, "evaluate.output=pipe")
    expect(ended.code == 2, f"exit code {ended.code}: {ended.errors}")
    expect((folder / "pipe").is_fifo(), "the pipe is gone")
    return _last(ended.errors)


def _replay(config: str, folder: Path) -> str:
    (folder / "record").mkdir()
    (folder / "record" / "config.json").write_text(config, encoding="utf-8")
    world = ("parallel=hybrid", "parallel.world=in_process", "sync=async", "embedding=served")
    ended = _train(folder, *world, "parallel.table_servers=1", "sync.replay=record")
    expect(ended.code == 3, f"exit code {ended.code}: {ended.errors}")
    return _last(ended.errors)[:100]


def _lost_latest(text: str | None, folder: Path) -> str:
    _trained(folder)
    (folder / "run" / "summary.json").unlink()
    if text is None:
        (folder / LATEST).unlink()
    else:
        (folder / LATEST).write_text(text, encoding="utf-8")
    copied = folder / "run" / "checkpoints" / "step_00000250.bak"
    shutil.copytree(folder / NEWEST, copied)
    before = sorted(path.name for path in copied.parent.glob("step_*"))
    rows = f"data.prepared={_rows(folder)}"
    ended = _train(folder, *STEPS, rows, "checkpoint.resume=auto")
    expect(ended.code == 0, ended.errors)
    expect("using the newest, step_00000020" in ended.output, ended.output)
    after = sorted(path.name for path in copied.parent.glob("step_*"))
    expect(before == after, f"{before} became {after}")
    return "found again, nothing removed"


def _contradiction(override: str, key: str, folder: Path) -> str:
    _trained(folder)
    ended = _evaluate(folder, override)
    expect(ended.code == 2, f"exit code {ended.code}: {ended.errors}")
    expect(f"{key} = " in ended.errors and "the checkpoint was made with" in ended.errors, "")
    return _last(ended.errors)


def _odd_report(file: str, text: str, folder: Path) -> str:
    _trained(folder)
    path = folder / "run" / file
    path.write_text(text.replace("…", path.read_text(encoding="utf-8")), encoding="utf-8")
    ended = program(["report", "report.runs=run"], folder)
    expect(ended.code in (0, 3), f"exit code {ended.code}: {ended.errors}")
    expect("\x1b" not in ended.output + ended.errors, "an escape came through")
    return f"exit code {ended.code} {_last(ended.errors)}"


ODD = {
    "summary-null": ("summary.json", "null"),
    "summary-empty": ("summary.json", "{}"),
    "summary-nan": ("summary.json", '{"status": "\\u001b[2J", "steps": NaN, "network": []}'),
    "summary-cut": ("summary.json", '{"status": "compl'),
    "events-cut": ("events.jsonl", '…{"kind": "progress", "st'),
    "events-null": ("events.jsonl", "…null\n[]\n{}\n"),
    "events-texts": ("events.jsonl", '…{"kind": "progress", "step": "a", "time_seconds": []}\n'),
    "events-keys": ("events.jsonl", '…{"kind": "evaluated", "step": 1, "time_seconds": 1e999}\n'),
    "config-list": ("config.json", "[1, 2]"),
    "config-escape": ("config.json", '{"name": "\\u001b]0;x\\u0007"}'),
}
CONTRADICTIONS = {
    "model": ("model=dlrm_paper", "model.name"),
    "seed": ("train.seed=5", "train.seed"),
    "experiment": ("+experiment=dct_hybrid", "gradient.name"),
}
RESUME = ("train", *SMALL, RUN, *STEPS, "train.steps=30", "checkpoint.resume=auto")
WAYS_OUT: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "watch": (".watch.html.partial", 0, ("watch", "watch.run=run")),
    "log": ("log", 3, RESUME),
    "checkpoints": ("checkpoints", 3, RESUME),
    "events": ("events.jsonl", 3, RESUME),
}
RECORDS = {
    "list": "[1]",
    "null": "null",
    "number": "5",
    "nothing": "{}",
    "no-section": '{"sync": null}',
    "deep": "[" * 100_000,
}
ATTACKS = (
    *(
        Attack(f"way-out-{name}", "nothing is written through it", partial(_way_out, *way))
        for name, way in WAYS_OUT.items()
    ),
    *(Attack(f"replay-{name}", "exit 3", partial(_replay, one)) for name, one in RECORDS.items()),
    Attack("tables-elsewhere", "a checkpoint decides no path", _tables_elsewhere),
    Attack("name-of-html", "escaped in HTML and Markdown", _odd_name),
    Attack("output-of-no-file", "exit 2, the pipe stays", _no_file),
    *(
        Attack(f"two-runs-{resume}", "one goes on, the other exits 2", partial(_two_runs, resume))
        for resume in ("never", "auto")
    ),
    Attack("two-sweeps", "one goes on, the other exits 2", _two_sweeps),
    Attack("two-outputs", "one at a time writes", _two_outputs),
    Attack("killed-holder", "the lock ends with its process", _killed_holder),
    *(
        Attack(f"manifest-{name}", "exit 3, file and field", partial(_lie, *lie))
        for name, lie in LIES.items()
    ),
    Attack("rows-elsewhere", "a checkpoint decides no path", _rows_elsewhere),
    Attack("latest-removed", "found again", partial(_lost_latest, None)),
    Attack("latest-damaged", "found again", partial(_lost_latest, "../../step_00000009\x1b")),
    *(
        Attack(f"evaluate-other-{name}", "exit 2, key and value", partial(_contradiction, *given))
        for name, given in CONTRADICTIONS.items()
    ),
    *(
        Attack(f"report-{name}", "a report, or exit 3", partial(_odd_report, *odd))
        for name, odd in ODD.items()
    ),
)
