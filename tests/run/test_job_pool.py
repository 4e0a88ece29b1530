"""Jobs beside each other: how many at one time, what a failure and what signals mean to them."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ctrl_c import press, press_elsewhere

from dlrm_hybrid.run.folder import OUTPUT_FILE
from dlrm_hybrid.run.jobs.pool import Pool
from dlrm_hybrid.run.jobs.process import JobProcess

# Each tells a common file of its begin and end, and waits for another where it is to.
BODY = """
import os, sys, time
def tell(sign):
    with open("told", "ab", buffering=0) as file:
        file.write(f"{sign}{number}\\n".encode())
def told(text):
    return text in open("told").read().split()
tell("+")
"""
# Signals wait until the program says so, as they do for a job of a sweep.
HEEDS = """
import signal
counts = []
def heed(number, frame):
    counts.append(number)
    tell("!")
    if STUBBORN and len(counts) < 3:
        return
    os._exit(130 if number == signal.SIGINT else 75)
signal.signal(signal.SIGINT, heed)
signal.signal(signal.SIGTERM, heed)
signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
print("ready", flush=True)
while True:
    time.sleep(0.01)
"""


class Seen:
    """A view that acts on what it is shown."""

    def __init__(self, act: Callable[[int, str], None] = lambda number, line: None) -> None:
        self.act = act
        self.endings: dict[int, tuple[int, str]] = {}
        self.stops: list[int] = []

    def runs(self, number: int, line: str) -> None:
        self.act(number, line)

    def ended(self, number: int, exit_code: int, message: str) -> None:
        self.endings[number] = (exit_code, message)

    def stopping(self, number: int) -> None:
        self.stops.append(number)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "told").touch()
    return tmp_path


def job(number: int, code: str) -> JobProcess:
    text = f"number = {number}\n{BODY}\n{code}"
    return JobProcess.of([sys.executable, "-c", text], Path(str(number)).absolute())


def told(here: Path) -> list[str]:
    return (here / "told").read_text().split()


def test_as_many_run_at_one_time_as_are_wanted_and_no_more(here: Path) -> None:
    meets = "while not told(f'+{number ^ 1}'): time.sleep(0.01)\ntell('-')"
    view = Seen()
    pool = Pool(2, lambda number: job(number, meets), view)
    assert pool.run(6) == 0
    assert [view.endings[number][0] for number in range(6)] == [0] * 6
    running = 0
    for line in told(here):
        running += 1 if line[0] == "+" else -1
        assert running <= 2


def test_a_failure_does_not_stop_the_others_and_its_code_is_the_first_by_number(here: Path) -> None:
    codes = {
        0: "while not told('-2'): time.sleep(0.01)",
        1: "while not told('-2'): time.sleep(0.01)\nprint('why', file=sys.stderr); sys.exit(4)",
        2: "print('because', file=sys.stderr); tell('-'); sys.exit(3)",
        3: "os.kill(os.getpid(), 9)",
    }
    view = Seen()
    assert Pool(3, lambda number: job(number, codes[number]), view).run(4) == 4
    assert view.endings == {
        0: (0, ""),
        1: (4, "why"),
        2: (3, "because"),
        3: (1, "was killed by SIGKILL"),
    }
    assert (here / "1" / OUTPUT_FILE).read_text() == "why\n"


def test_a_job_that_there_is_nothing_to_start_of_takes_no_place(here: Path) -> None:
    begun = lambda number: job(number, "") if number == 2 else 2 * number  # noqa: E731
    pool = Pool(1, begun, Seen())
    assert pool.run(3) == 2
    assert pool.exit_codes == {0: 0, 1: 2, 2: 0}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_reaches_each_running_job_once_and_no_other_begins(
    number: signal.Signals, code: int, here: Path
) -> None:
    ready: set[int] = set()

    def act(job: int, line: str) -> None:
        if line == "ready" and job not in ready:
            ready.add(job)
            if len(ready) == 2:
                os.kill(os.getpid(), number)

    view = Seen(act)
    heeds = f"STUBBORN = False\n{HEEDS}"
    assert Pool(2, lambda number: job(number, heeds), view).run(5) == code
    assert sorted(told(here)) == ["!0", "!1", "+0", "+1"]
    assert (view.stops, set(view.endings.values())) == ([number], {(code, "")})


def test_the_third_ctrl_c_kills_jobs_that_do_not_end(here: Path) -> None:
    sent: list[int] = []

    def act(job: int, line: str) -> None:
        if line == "ready" and told(here).count("!0") == len(sent):
            sent.append(job)
            os.kill(os.getpid(), signal.SIGINT)

    view = Seen(act)
    assert Pool(1, lambda number: job(number, f"STUBBORN = True\n{HEEDS}"), view).run(2) == 130
    assert told(here) == ["+0", "!0", "!0"]
    assert view.endings == {0: (1, "was killed by SIGKILL")}


def test_a_signal_before_a_job_has_handlers_waits_for_them(here: Path) -> None:
    """It is sent at once, while the interpreter starts: no job dies of it half-way."""
    heeds = f"STUBBORN = False\n{HEEDS}"

    def begin(number: int) -> JobProcess:
        os.kill(os.getpid(), signal.SIGINT)
        return job(number, heeds)

    assert Pool(2, begin, Seen()).run(2) == 130
    assert told(here) == ["+0", "!0"]


def test_an_error_of_the_program_leaves_no_job_behind(here: Path) -> None:
    begun: list[JobProcess] = []

    def begin(number: int) -> JobProcess:
        begun.append(job(number, "while True: time.sleep(0.01)"))
        return begun[-1]

    def act(number: int, line: str) -> None:
        raise RuntimeError("a fault of the view")

    with pytest.raises(RuntimeError, match="a fault of the view"):
        Pool(2, begin, Seen(act)).run(2)
    assert [one.process.returncode for one in begun] == [-signal.SIGKILL] * len(begun)


@pytest.mark.parametrize("ctrl_c", [press, press_elsewhere])
def test_a_ctrl_c_while_a_job_is_started_leaves_none(
    here: Path, monkeypatch: pytest.MonkeyPatch, ctrl_c: Callable[[], None]
) -> None:
    started, begin = list[subprocess.Popen[bytes]](), subprocess.Popen

    def interrupted(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(begin(*args, **options))
        ctrl_c()
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        job(0, "time.sleep(60)")
    assert started[0].poll() == -signal.SIGKILL


def test_a_table_is_no_line_of_progress(here: Path) -> None:
    text = "step 5: loss 0.5\\n┏━━━┓\\n┃ a ┃\\n│ 1 │\\n└───┘\\n"
    one = JobProcess.of([sys.executable, "-X", "utf8", "-c", f"print('{text}')"], here / "0")
    one.process.wait()
    assert one.last_line() == "step 5: loss 0.5"
    assert one.ended() == 0
    one.close()


def test_only_what_this_attempt_has_printed_is_shown(here: Path) -> None:
    folder = here / "0"
    folder.mkdir()
    (folder / OUTPUT_FILE).write_text("of an attempt before\n")
    one = JobProcess.of([sys.executable, "-c", ""], folder)
    one.process.wait()
    assert one.last_line() == ""
    assert one.ended() == 0
    one.close()
