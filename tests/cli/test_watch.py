"""The verb that shows a run while it goes on."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread

import psutil
import pytest
import rank_faults
import struck_program
from patience import HANG_SECONDS
from world_faults import await_stop
from world_runs import Train

from dlrm_hybrid.cli.main import run
from dlrm_hybrid.cli.verbs import watch as verb

POLL_SECONDS = 0.02
REFRESH = 'http-equiv="refresh"'


def watching(folder: Path, *more: str) -> int:
    return run(["dlrm_hybrid", "watch", f"watch.run={folder}", "watch.seconds=0.5", *more])


@pytest.mark.slow
def test_a_run_is_shown_from_before_its_begin_to_its_end(
    small_rows: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It stops at two steps until each is shown."""
    folder, output = tmp_path / "run", tmp_path / "mine.html"
    seen: list[str] = []
    more = [*small_rows, "telemetry.every=20", "train.evaluate_every=40"]
    command = [sys.executable, struck_program.__file__, "rank_faults:struck_rank", "train", *more]
    process: list[subprocess.Popen[bytes]] = []

    def show(text: str) -> None:
        until = time.monotonic() + HANG_SECONDS
        while process[0].poll() is None and text not in "".join(seen[-1:]):
            assert time.monotonic() < until
            if output.exists() and ((page := output.read_text()) not in seen[-1:]):
                seen.append(page)
            time.sleep(POLL_SECONDS)

    def begin() -> None:
        rank_faults.plan(folder, "SIGSTOP", 20, 60)
        process.append(
            subprocess.Popen([*command, f"hydra.run.dir={folder}"], stdout=subprocess.DEVNULL)
        )
        try:
            for step in (20, 60):
                stopped = await_stop(folder, "worker-0")
                show(f"step {step} of 93")
                os.kill(stopped, signal.SIGCONT)
            show("step 93 of 93")
        except BaseException:
            process[0].kill()
            raise
        process[0].wait()

    thread = Thread(target=begin)
    thread.start()
    try:
        assert watching(folder, f"watch.output={output}") == 0
    finally:
        thread.join()
    assert process[0].returncode == 0
    told = capsys.readouterr().out
    assert f"waiting for a run to begin in {folder}\n" in told
    assert f"watching {folder}: open {output}\n" in told
    assert f"complete; {output} stays as it is\n" in told
    # Every page that was ever there is whole.
    assert all(text.endswith("</html>\n") for text in seen)
    assert sum(REFRESH in text for text in seen) >= 2
    last = output.read_text()
    assert REFRESH not in last
    assert "step 93 of 93 (100%)" in last
    summary = json.loads((folder / "summary.json").read_text())
    assert f"{summary['test']['loss']:.4f}" in last


def test_a_run_that_has_ended_has_its_page_at_once(train: Train) -> None:
    code, folder = train("run", "train.steps=20", "telemetry.every=10")
    assert code == 0
    assert watching(folder) == 0
    html = (folder / "watch.html").read_text()
    assert '<span class="status">complete</span>' in html
    assert REFRESH not in html
    # Nothing is written through a link that somebody has put there.
    own = folder.with_name("own")
    own.write_text("mine")
    (folder / ".watch.html.partial").symlink_to(own)
    assert watching(folder) == 0
    assert own.read_text() == "mine"
    # It is in nobody's way.
    assert (
        run(["dlrm_hybrid", "report", f"report.runs={folder}", f"report.output={folder}.html"]) == 0
    )


@pytest.mark.slow
def test_a_killed_run_and_an_interrupted_watch_leave_a_page_that_says_so(
    small_rows: list[str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = tmp_path / "run"
    options = [*small_rows, "train.epochs=1000000", f"hydra.run.dir={folder}"]
    command = [sys.executable, "-m", "dlrm_hybrid"]
    process = subprocess.Popen([*command, "train", *options], stdout=subprocess.DEVNULL)
    request.addfinalizer(process.kill)
    (tmp_path / "run").mkdir(exist_ok=True)
    watcher = subprocess.Popen(
        [*command, "watch", f"watch.run={folder}", "watch.seconds=0.5"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    request.addfinalizer(watcher.kill)
    html, until = folder / "watch.html", time.monotonic() + HANG_SECONDS
    while not html.exists() or "samples a second" not in html.read_text():
        assert process.poll() is None
        assert watcher.poll() is None
        assert time.monotonic() < until
        time.sleep(POLL_SECONDS)
    assert REFRESH in html.read_text()
    watcher.send_signal(signal.SIGINT)
    _, errors = watcher.communicate(timeout=HANG_SECONDS)
    assert (watcher.returncode, errors) == (130, "stopped by Ctrl-C\n")
    assert REFRESH not in html.read_text()
    assert '<span class="status">running</span>' in html.read_text()

    ranks = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    psutil.wait_procs(ranks, timeout=HANG_SECONDS)
    assert watching(folder) == 0
    assert '<span class="status">unfinished</span>' in html.read_text()


def test_a_folder_that_cannot_come_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["dlrm_hybrid", "watch"]) == 2
    assert "watch.run = null: name a run folder" in capsys.readouterr().err
    folder = tmp_path / "none" / "run"
    assert watching(folder) == 2
    assert f"watch.run = {folder}: no such folder, nor the one above" in capsys.readouterr().err


def test_what_can_never_be_a_run_is_not_waited_for(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert watching(tmp_path / "file") == 2
    assert f"watch.run = {tmp_path}/file: is no folder\n" in capsys.readouterr().err
    _, folder = train("0", "train.steps=2")
    assert watching(folder.parent) == 2
    told = f"watch.run = {folder.parent}: is no run, but has some; name one, such as {folder}\n"
    assert told in capsys.readouterr().err


def test_sigterm_does_not_speak_of_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [(one, signal.getsignal(one)) for one in (signal.SIGTERM, signal.SIGINT)]
    monkeypatch.setattr(verb.time, "sleep", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    try:
        assert watching(tmp_path / "run") == 75
    finally:
        for one, handler in before:
            signal.signal(one, handler)
    assert capsys.readouterr().err == "stopped by SIGTERM\n"


def test_who_runs_is_told_from_its_lock(train: Train, tmp_path: Path) -> None:
    _, folder = train("run", "train.steps=2")
    lock, here = folder / ".lock", socket.gethostname()
    assert not verb._is_running(folder, 0)
    lock.write_text(f"process {os.getpid()} on {here}")
    assert verb._is_running(folder, 0)
    born = psutil.Process().create_time()
    os.utime(lock, (born - 60, born - 60))  # a process of before had this number
    assert not verb._is_running(folder, 0)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    lock.write_text(f"process {ended.pid} on {here}")
    # A zombie until somebody waits for it, as children of a container's first process stay.
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    assert not verb._is_running(folder, 0)
    ended.wait()
    assert not verb._is_running(folder, 0)
    for text in ("", "process x on y", "process 1 on", "anything at all else"):
        lock.write_text(text)
        assert not verb._is_running(folder, 0)
    lock.write_text(f"process {os.getpid()} on not-{here}")
    assert verb._is_running(folder, 0)
    assert not verb._is_running(folder, 1e4)
    shutil.rmtree(folder)
    assert not verb._is_running(folder, 0)
