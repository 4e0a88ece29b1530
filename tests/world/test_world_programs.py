"""Programs that start worlds of processes, as people write them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from patience import HANG_SECONDS

EXAMPLE = Path(__file__).parent.parent.parent / "scripts" / "examples" / "own_batches.py"
HEAD = """
import sys, time
import numpy as np
from dlrm_hybrid import ModelSpec, World

SPEC = ModelSpec(embedding_dim=4, bottom=(3, 8, 4), top=(4, 1), table_rows=(9, 9))


def load(trainer, trainers):
    draw = np.random.default_rng(trainer)
    for _ in range(10_000):
        yield draw.random((8, 3), np.float32), draw.integers(0, 9, (8, 2)), draw.integers(0, 2, 8)


def world():
    return World.processes(SPEC, load, trainers=2, cuts=[], servers=1, batch_size=8)

"""


def start(tmp_path: Path, body: str) -> subprocess.Popen[str]:
    script = tmp_path / "program.py"
    script.write_text(HEAD + body)
    return subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(short_folder(tmp_path))},
    )


def assert_says(program: subprocess.Popen[str], text: str, tmp_path: Path) -> None:
    """It ends well, has said this, and leaves nothing."""
    try:
        out, err = program.communicate(timeout=HANG_SECONDS)
    finally:
        program.kill()
    assert (program.returncode, out) == (0, text), err
    assert_nothing_is_left(tmp_path)


def short_folder(tmp_path: Path) -> Path:
    """For sockets: a path of pytest is too long."""
    folder = Path("/tmp") / f"w{os.getpid()}-{abs(hash(tmp_path)) % 10**6}"
    folder.mkdir(exist_ok=True)
    return folder


def assert_nothing_is_left(tmp_path: Path) -> None:
    folder = short_folder(tmp_path)
    found = [path.name for path in folder.iterdir() if path.name.startswith("dlrm-")]
    assert found == [], found
    shutil.rmtree(folder)


@pytest.mark.slow
def test_a_loader_in_a_script_may_have_processes(tmp_path: Path) -> None:
    body = """
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, row):
        return np.full(3, row / 32, np.float32), np.array([row % 9, 0]), row % 2


def from_workers(trainer, trainers):
    return DataLoader(Rows(), 8, num_workers=1)


if __name__ == "__main__":
    for make in (World.in_process, World.processes):
        with make(SPEC, from_workers, trainers=1, cuts=[], servers=0, batch_size=8) as one:
            print([result.loss for result in one.epoch()])
"""
    program = start(tmp_path, body)
    out, err = program.communicate(timeout=HANG_SECONDS)
    here, there = out.splitlines() if program.returncode == 0 else (err, "")
    assert here == there and here.count(",") == 3
    assert_nothing_is_left(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [
        "with world() as one:\n    print(one.step().rows)\n",
        """
if __name__ == "__main__":
    one = world()
    print(one.step().rows)
""",
    ],
    ids=["without a guard", "not closed"],
)
def test_a_script_ends_and_leaves_nothing(body: str, tmp_path: Path) -> None:
    assert_says(start(tmp_path, body), "16\n", tmp_path)


@pytest.mark.slow
def test_an_interactive_session_has_worlds_of_processes() -> None:
    program = HEAD + "with world() as one:\n    print(one.step().rows)\n"
    done = subprocess.run(
        [sys.executable, "-"], input=program, capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert (done.returncode, done.stdout) == (0, "16\n"), done.stderr


@pytest.mark.slow
def test_ctrl_c_while_ranks_are_started_ends_them_all(tmp_path: Path) -> None:
    body = """
import os, signal, threading
import psutil
from dlrm_hybrid.run import supervisor
from dlrm_hybrid.world.ranks import WorldRanks

if __name__ == "__main__":
    meeting, closing = threading.Event(), threading.Event()
    start, meet, close = supervisor.start, WorldRanks._meet, WorldRanks.close

    def start_after_close(rank, entry):
        if rank.index == 0:
            meeting.wait()
            os.kill(os.getpid(), signal.SIGINT)
            closing.wait()
            time.sleep(0.2)  # close has killed all that there is
        return start(rank, entry)

    def meet_seen(self, workers):
        meeting.set()
        return meet(self, workers)

    def close_seen(self):
        closing.set()
        close(self)

    supervisor.start = start_after_close
    WorldRanks._meet, WorldRanks.close = meet_seen, close_seen
    try:
        world()
    except KeyboardInterrupt:
        children = psutil.Process().children(recursive=True)
        print([one.pid for one in children if one.parent().pid != os.getpid()])
"""
    assert_says(start(tmp_path, body), "[]\n", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_while_a_world_closes_leaves_nothing(tmp_path: Path, times: int) -> None:
    body = f"""
import os, signal
import psutil
from dlrm_hybrid.parallel.messages import values_of
from dlrm_hybrid.world import ranks

if __name__ == "__main__":
    encode, told = ranks.encode, []

    def interrupted(frame):
        if values_of(frame)["do"] == "end":
            told.append(frame)
            if len(told) <= {times}:
                os.kill(os.getpid(), signal.SIGINT)
        return encode(frame)

    ranks.encode = interrupted
    try:
        with world() as one:
            one.step()
    except KeyboardInterrupt:
        children = psutil.Process().children(recursive=True)
        left = [one.pid for one in children if one.parent().pid != os.getpid()]
        print(len(told), left, one._session.folder.exists())
"""
    assert_says(start(tmp_path, body), "2 [] False\n", tmp_path)


@pytest.mark.slow
def test_a_second_ctrl_c_amid_answers_waits_for_no_goodbyes(tmp_path: Path) -> None:
    """Workers wait then for the program to read, and take no order to end."""
    body = """
import os, signal
from dlrm_hybrid.wire.frame import Kind
from dlrm_hybrid.world import ranks

SPEC = ModelSpec(embedding_dim=4, bottom=(3, 8, 4), top=(4, 1), table_rows=(9, 300_000))

if __name__ == "__main__":
    decode, ranks.LEAVE_SECONDS = ranks.decode, 1e6

    def interrupted(content):
        frame = decode(content)
        if frame.kind is Kind.WEIGHTS:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
        return frame

    ranks.decode = interrupted
    try:
        with world() as one:
            one.state_dict()
    except KeyboardInterrupt:
        print("ended")
"""
    assert_says(start(tmp_path, body), "ended\n", tmp_path)


@pytest.mark.slow
def test_a_fork_of_the_program_drives_no_world(tmp_path: Path) -> None:
    body = """
import os, tempfile
from dlrm_hybrid.types import DlrmError

if __name__ == "__main__":
    here = World.in_process(SPEC, trainers=2, cuts=[], servers=1, batch_size=8)
    there = World.processes(SPEC, trainers=2, cuts=[], servers=1, batch_size=8)
    batches = list(load(0, 1))[:2]
    with here, there, tempfile.TemporaryDirectory() as folder:
        for one in (here, there):
            calls = [
                lambda: one.step(batches), lambda: one.evaluate(batches), one.state_dict,
                lambda: one.save(folder), lambda: one.load(folder), lambda: one.bytes,
            ]
            one.step(batches)
            if os.fork() == 0:
                refused = 0
                for call in calls:
                    try:
                        call()
                    except DlrmError as error:
                        refused += f"belongs to process {os.getppid()}" in str(error)
                os._exit(refused)
            print(os.waitstatus_to_exitcode(os.wait()[1]), len(calls), one.steps)
        print(here.step(batches) == there.step(batches))
"""
    assert_says(start(tmp_path, body), "6 6 1\n6 6 1\nTrue\n", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["sys.exit(0)", "one.close(); sys.exit(0)", "del one; sys.exit(0)"])
def test_a_fork_of_the_program_ends_no_world(tmp_path: Path, end: str) -> None:
    body = f"""
import os

if __name__ == "__main__":
    one = world()
    one.step()
    child = os.fork()
    if child == 0:
        {end}
    assert os.waitpid(child, 0)[1] == 0
    print(one._session.folder.exists(), one.step().step)
    one.close()
    print(one._session.folder.exists())
"""
    assert_says(start(tmp_path, body), "True 2\nFalse\n", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("world", ["in_process", "processes"])
def test_the_example_learns(world: str) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), world], capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert done.returncode == 0, done.stderr
    last = next(line for line in done.stdout.splitlines() if line.startswith("epoch 1"))
    assert float(last.split()[-1]) > 0.84
    assert "times fewer than float32" in done.stdout
