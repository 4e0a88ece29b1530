"""Ranks end with their supervisor, and say why they ended."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import forkserver
from pathlib import Path

import psutil
import pytest
from patience import HANG_SECONDS

from dlrm_hybrid.run import supervisor
from dlrm_hybrid.run.rank.process import Outcome, Rank
from dlrm_hybrid.run.supervisor import Forwarder, run_attempts, run_ranks
from dlrm_hybrid.telemetry.events import Event, Kind
from dlrm_hybrid.train.signals import StopRequest
from dlrm_hybrid.types import DataError, DeadlineError, InterruptedRunError, PeerLostError

HERE = [str(folder) for folder in Path(__file__).parents[:2]]  # of what tests import


def event(step: int, **values: object) -> Event:
    return Event(Kind.TICK, step, 0.0, values)


def ends_in_three_ways(argument: str, report, stop: StopRequest) -> None:
    """One at each attempt, a warning of limits before: killed by somebody, a crash, an abort."""
    attempt = Path(argument).read_text().count("attempt")
    os.write(1, b"attempt: std::bad_alloc\n")
    os.kill(os.getpid(), (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT)[attempt])


def tells_its_pid(argument: str, report, stop: StopRequest) -> None:
    report(event(int(argument), pid=os.getpid(), group=os.getpgid(0)))


def has_bad_data(argument: str, report, stop: StopRequest) -> None:
    raise DataError("train.txt:3:7: 'x' is not an integer")


def breaks(argument: str, report, stop: StopRequest) -> None:
    raise RuntimeError("something odd")


def is_killed(argument: str, report, stop: StopRequest) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def loses_a_peer(argument: str, report, stop: StopRequest) -> None:
    raise PeerLostError(int(argument), "its connection ended")


def waits_in_vain(argument: str, report, stop: StopRequest) -> None:
    """For ranks of these numbers, once all are there; without any it only lives, or is stopped."""
    folder, size, waits_for = json.loads(argument)
    if waits_for == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if not waits_for:
        waits_for_signals(argument, lambda event: None, stop)
    while len(list(Path(folder).glob("*.pid"))) < size:
        time.sleep(0.005)
    raise DeadlineError(f"nothing from {waits_for}", waits_for)


def waits_for_signals(argument: str, report, stop: StopRequest) -> None:
    report(event(0, pid=os.getpid()))
    while True:
        stop.check()
        time.sleep(0.005)


def waits_unless_told(argument: str, report, stop: StopRequest) -> None:
    if argument == "fails":
        raise InterruptedRunError("told to stop")
    waits_for_signals(argument, report, stop)


def ranks(folder: Path, *arguments: str) -> list[Rank]:
    return [
        Rank(index=index, name=f"worker-{index}", argument=argument, log_folder=folder)
        for index, argument in enumerate(arguments)
    ]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_events_reach_the_supervisor_and_ranks_are_gone_after(tmp_path: Path) -> None:
    seen: list[Event] = []
    outcome = run_ranks(ranks(tmp_path, "3", "4"), f"{__name__}:tells_its_pid", seen.append)
    assert (outcome.exit_code, outcome.message) == (0, "")
    assert sorted(one.step for one in seen) == [3, 4]
    for one in seen:
        assert one.values["pid"] not in (os.getpid(), os.getppid())
        assert one.values["group"] == one.values["pid"]
        assert not alive(one.values["pid"])
    assert (tmp_path / "worker-1.pid").exists()


@pytest.mark.parametrize(
    ("entry", "code", "message"),
    [
        ("has_bad_data", 3, "train.txt:3:7: 'x' is not an integer"),
        ("breaks", 1, "worker-0 (rank 0): RuntimeError: something odd; see "),
        ("is_killed", 1, "worker-0 (rank 0) was killed by SIGKILL; see "),
    ],
)
def test_a_failure_has_a_code_and_a_message(
    tmp_path: Path, entry: str, code: int, message: str
) -> None:
    outcome = run_ranks(ranks(tmp_path, ""), f"{__name__}:{entry}", lambda event: None)
    assert outcome.exit_code == code
    assert outcome.message.startswith(message)
    if entry == "breaks":
        assert "RuntimeError: something odd" in (tmp_path / "worker-0.log").read_text()


def test_the_first_failure_ends_the_others(tmp_path: Path) -> None:
    outcome = run_ranks(
        ranks(tmp_path, "waits", "fails"), f"{__name__}:waits_unless_told", lambda event: None
    )
    assert (outcome.exit_code, outcome.message) == (130, "told to stop")
    for index in (0, 1):
        assert not alive(int((tmp_path / f"worker-{index}.pid").read_text()))


@pytest.mark.parametrize(
    ("entry", "attempts"),
    [("is_killed", 3), ("loses_a_peer", 3), ("has_bad_data", 1), ("breaks", 1)],
)
def test_only_a_loss_is_followed_by_another_attempt(
    tmp_path: Path, entry: str, attempts: int
) -> None:
    made: list[list[Rank]] = []

    def next_ranks() -> list[Rank]:
        made.append(ranks(tmp_path, "0"))
        return made[-1]

    def again(lost: Outcome) -> Outcome | None:
        return None if len(made) < 3 else lost

    with Forwarder.installed() as forwarder:
        outcome = run_attempts(
            forwarder, next_ranks, f"{__name__}:{entry}", lambda event: None, again
        )
    assert len(made) == attempts
    assert outcome.exit_code == {"has_bad_data": 3}.get(entry, 1)


def test_a_limit_is_taken_for_the_cause_where_it_may_be_and_is_no_loss(tmp_path: Path) -> None:
    log = tmp_path / "worker-0.log"
    lost: list[str] = []

    with Forwarder.installed() as forwarder:
        outcome = run_attempts(
            forwarder,
            lambda: ranks(tmp_path, str(log)),
            f"{__name__}:ends_in_three_ways",
            lambda event: None,
            lambda outcome: lost.append(outcome.message),
        )
    named = [
        f"worker-0 (rank 0) was killed by {name}; see {log}" for name in ("SIGKILL", "SIGSEGV")
    ]
    assert lost == named
    assert (outcome.exit_code, outcome.lost) == (5, None)
    assert outcome.message.startswith("worker-0 (rank 0): out of memory: ")


@pytest.mark.parametrize(
    ("waits", "message"),
    [
        (([1, 2], [0, 2], []), "worker-2 (rank 2) does not answer worker-"),
        (([1, 2], [], "stopped"), "worker-2 (rank 2) has been stopped, by SIGSTOP or a debugger: "),
    ],
)
def test_who_is_silent_is_named(
    tmp_path: Path, waits: tuple[list[int] | str, ...], message: str
) -> None:
    arguments = [json.dumps([str(tmp_path), len(waits), one]) for one in waits]
    entry = f"{__name__}:waits_in_vain"
    outcome = run_ranks(ranks(tmp_path, *arguments), entry, lambda event: None)
    assert (outcome.exit_code, bool(outcome.lost)) == (1, True)
    assert outcome.message.startswith(message)


def test_of_two_that_miss_each_other_both_are_named(tmp_path: Path) -> None:
    arguments = [json.dumps([str(tmp_path), 2, one]) for one in ([1], [0])]
    entry = f"{__name__}:waits_in_vain"
    outcome = run_ranks(ranks(tmp_path, *arguments), entry, lambda event: None)
    one, other = outcome.message.split(" does not answer ")
    assert {one, other[:17]} == {"worker-0 (rank 0)", "worker-1 (rank 1)"}
    assert outcome.message.endswith(f": nothing from [{one[-2]}]")


def test_nobody_starts_again_after_a_signal(tmp_path: Path) -> None:
    asked: list[Outcome] = []

    def strike(event: Event) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(event.values["pid"], signal.SIGKILL)

    def again(lost: Outcome) -> Outcome | None:
        asked.append(lost)
        return lost

    entry = f"{__name__}:waits_for_signals"
    with Forwarder.installed() as forwarder:
        run_attempts(forwarder, lambda: ranks(tmp_path, ""), entry, strike, again)
    assert asked == []


def test_a_signal_while_an_exit_code_is_read_does_not_take_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, read_from = forkserver.read_signed, list[int]()

    def read_after_a_signal(descriptor: int) -> int:
        read_from.append(descriptor)
        if len(read_from) == 3:  # the first two were the pids of the two ranks
            os.kill(os.getpid(), signal.SIGTERM)
        return read(descriptor)

    monkeypatch.setattr(forkserver, "read_signed", read_after_a_signal)
    outcome = run_ranks(ranks(tmp_path, "3", "4"), f"{__name__}:tells_its_pid", lambda event: None)
    assert len(read_from) == 4
    assert (outcome.exit_code, outcome.message) == (0, "")


def test_a_signal_that_comes_before_the_ranks_waits_for_them(tmp_path: Path) -> None:
    main = threading.main_thread().ident
    assert main is not None
    fired = threading.Event()

    def fire() -> None:
        while signal.getsignal(signal.SIGTERM) in before:
            time.sleep(0.0005)
        fired.set()
        os.kill(os.getpid(), signal.SIGTERM)

    before = (signal.getsignal(signal.SIGTERM),)
    thread = threading.Thread(target=fire)
    thread.start()
    outcome = run_ranks(ranks(tmp_path, ""), f"{__name__}:waits_for_signals", lambda event: None)
    thread.join()
    assert fired.is_set()
    assert outcome.exit_code == 75


def test_nothing_lives_on_after_kill_9_of_the_supervisor(tmp_path: Path) -> None:
    program = (
        f"import sys; sys.path[:0] = {HERE!r}\n"
        "from pathlib import Path\n"
        "import test_supervisor as t\n"
        "from dlrm_hybrid.run.supervisor import run_ranks\n"
        f"run_ranks(t.ranks(Path({str(tmp_path)!r}), ''), 'test_supervisor:waits_for_signals',\n"
        "    lambda event: print(event.values['pid'], flush=True))\n"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert supervisor.stdout is not None
    rank = int(supervisor.stdout.readline())
    forkserver = int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])
    assert forkserver != supervisor.pid
    assert alive(rank)
    supervisor.kill()
    supervisor.wait()
    deadline = time.monotonic() + HANG_SECONDS
    while (alive(rank) or alive(forkserver)) and time.monotonic() < deadline:
        time.sleep(0.002)
    assert not alive(rank)
    assert not alive(forkserver)


def lives_through_signals_to_all(argument: str, report, stop: StopRequest) -> None:
    report(event(0, forkserver=os.getppid(), preempted=stop.severity))
    waits_for_signals(argument, lambda event: None, stop)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_to_every_process_is_one_to_the_supervisor(
    tmp_path: Path, number: int, code: int
) -> None:
    """As systemd sends it; ranks get it twice, forkserver and resource tracker ignore it."""
    helpers, before = list[psutil.Process](), signal.getsignal(number)

    def send_to_all(event: Event) -> None:
        if not helpers:
            helpers.append(psutil.Process(event.values["forkserver"]))
            everybody = psutil.Process().children(recursive=True)
            assert len(everybody) > 1  # forkserver, and ranks of it
            for one in everybody:
                one.send_signal(number)
            os.kill(os.getpid(), number)

    entry = f"{__name__}:lives_through_signals_to_all"
    outcome = run_ranks(ranks(tmp_path, "", ""), entry, send_to_all)
    assert outcome.exit_code == code
    assert helpers[0].is_running()
    assert signal.getsignal(number) is before


WARMS_UP = """
import signal
from dlrm_hybrid.run.supervisor import ensure_forkserver
ensure_forkserver([])
signal.pause()
"""
SLOW_IMPORT = """
import os, time
print(os.getpid(), flush=True)
time.sleep(3600)
"""


def test_a_forkserver_does_not_outlive_its_parent_while_it_imports(tmp_path: Path) -> None:
    for name in ("torch", "numba"):  # whichever is first
        (tmp_path / f"{name}.py").write_text(SLOW_IMPORT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-c", WARMS_UP]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        one = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        try:
            one.wait(HANG_SECONDS)
        finally:
            if one.is_running():
                one.kill()


def test_a_forkserver_that_is_killed_while_it_starts_is_a_loss(tmp_path: Path) -> None:
    """Ranks may start again, from a new one."""
    program = (
        "import os, signal, sys\n"
        f"sys.path[:0] = {HERE!r}\n"
        "from multiprocessing import forkserver\n"
        "from pathlib import Path\n"
        "import test_supervisor as t\n"
        "from dlrm_hybrid.run import supervisor\n"
        "from dlrm_hybrid.run.supervisor import Forwarder, ensure_forkserver, run_attempts\n"
        "ensure_forkserver([])\n"
        "pid = forkserver._forkserver._forkserver_pid\n"
        "os.kill(pid, signal.SIGSTOP)  # amid its imports\n"
        "read = forkserver.read_signed\n"
        "def read_of_the_killed(descriptor):  # when it has been asked for a rank\n"
        "    os.kill(pid, signal.SIGKILL)\n"
        "    forkserver.read_signed, supervisor.PRELOAD = read, 'json'\n"
        "    return read(descriptor)\n"
        "forkserver.read_signed = read_of_the_killed\n"
        "lost = []\n"
        "with Forwarder.installed() as forwarder:\n"
        f"    ranks = lambda: t.ranks(Path({str(tmp_path)!r}), '3')\n"
        "    again = lambda outcome: lost.append(outcome)\n"
        "    entry = 'test_supervisor:tells_its_pid'\n"
        "    end = run_attempts(forwarder, ranks, entry, lambda event: None, again)\n"
        "assert end.exit_code == 0, end\n"
        "assert lost and all(one.lost for one in lost), lost\n"
        "print(lost[0].message)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "that ranks are forked from ended before worker-0 was there; see " in done.stdout


def test_ranks_whose_forkserver_is_killed_are_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = forkserver.ForkServer()  # without slow imports; other tests keep theirs
    monkeypatch.setattr(supervisor, "PRELOAD", "json")
    for name in ("set_forkserver_preload", "ensure_running", "connect_to_new_process"):
        monkeypatch.setattr(forkserver, name, getattr(own, name))

    def kill_forkserver(event: Event) -> None:
        os.kill(event.values["forkserver"], signal.SIGKILL)

    entry = f"{__name__}:lives_through_signals_to_all"
    outcome = run_ranks(ranks(tmp_path, ""), entry, kill_forkserver)
    own._stop()
    assert (outcome.exit_code, bool(outcome.lost)) == (1, True)
    assert "went with the process that ranks are forked from" in outcome.message
