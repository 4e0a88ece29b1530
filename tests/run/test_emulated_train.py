"""Worlds on an emulated network: the same bits, its rate, nothing left, refused with a reason."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from emulation_hosts import are_gone, family, has_netem, links, needs_namespaces, network_namespaces
from launched_runs import environment, program
from patience import HANG_SECONDS
from world_runs import Train, assert_same, summary

from dlrm_hybrid.telemetry.rank_meter import WARMUP_STEPS

WORLD = ("parallel=hybrid", "parallel.cuts=[bottom.1]")
EMULATED = (*WORLD, "network=emulated", "network.rate=100mbit")
SIZE = 5
STEPS = ("train.steps=10", "checkpoint.every=10")

pytestmark = needs_namespaces
ONE = ("parallel.servers=1",)  # as without `parallel.machines`


def start(prefix: Sequence[str], *arguments: str) -> subprocess.Popen[str]:
    command = [*prefix, sys.executable, *program(*arguments)]
    return subprocess.Popen(
        command,
        env=environment({}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def inside_of(pid: int) -> str:
    """The network namespace of a process."""
    return str(Path(f"/proc/{pid}/ns/net").readlink())


def started(process: subprocess.Popen[str], folder: Path) -> dict[str, int]:
    """Process ids of all ranks by name, once the first step is on record."""
    until = time.monotonic() + HANG_SECONDS
    events = folder / "events.jsonl"
    while process.poll() is None and time.monotonic() < until:
        if events.exists() and '"kind": "progress"' in events.read_text():
            return {path.stem: int(path.read_text()) for path in folder.glob("log/*.pid")}
        time.sleep(0.02)
    process.kill()
    assert process.stdout is not None
    raise AssertionError(f"training did not begin: {process.stdout.read()}")


@pytest.mark.slow
@pytest.mark.parametrize(("machines", "hosts"), [("null", SIZE), ("2", 2)])
def test_it_learns_the_same_as_on_the_hosts_own_network(
    machines: str, hosts: int, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    code, folder = train("emulated", *EMULATED, *STEPS, f"parallel.machines={machines}", *ONE)
    assert code == 0
    assert f"emulated network: {hosts} hosts at 100 Mbit/s" in capsys.readouterr().out
    code, plain = train("plain", *WORLD, *STEPS)
    assert code == 0
    assert_same(folder, plain, 10)
    told, expected = summary(folder)["network"], summary(plain)["network"]
    assert told["by_class"] == expected["by_class"]
    assert told["rate_bits_per_second"] == 10**8
    assert set(told["utilization_by_rank"]) == {str(rank) for rank in range(SIZE)}
    assert 0 < told["utilization_mean_direction"] <= told["utilization"]
    assert told["utilization"] == max(told["utilization_by_rank"].values()) <= 1.1
    assert expected["utilization"] is None, "loopback is no link"
    if hosts == SIZE:
        assert told["bytes_total"] < told["interface_bytes"]


@pytest.mark.slow
def test_frames_between_a_trainer_and_tables_beside_it_cross_no_link(train: Train) -> None:
    served = ("parallel=hybrid", "parallel.cuts=[]", "embedding=served", "parallel.table_servers=1")
    emulated = (*served, "network=emulated", "network.rate=400mbit", "gradient=dct")
    steps = ("train.steps=30", "checkpoint.every=30")
    code, folder = train("colocated", *emulated, *steps, "parallel.machines=2", *ONE)
    assert code == 0
    code, dedicated = train("dedicated", *emulated, *steps)
    assert code == 0
    assert_same(folder, dedicated, 30)
    told, expected = summary(folder)["network"], summary(dedicated)["network"]
    of_tables = expected["by_class"]["embedding"]["bytes"]
    # Frames are counted wherever they go; one may be counted with the warm-up.
    assert told["by_class"]["embedding"]["bytes"] == pytest.approx(of_tables, rel=0.03)
    saved = expected["interface_bytes"] - told["interface_bytes"]
    # Trainer 0 sends neither its rows nor its pushes and pulls over a link.
    dense = sum(expected["by_class"][one]["bytes"] for one in ("gradient_push", "parameter_pull"))
    assert 0.45 < saved / (of_tables + dense) < 0.6


def test_with_latency_it_learns_the_same_and_the_cost_is_on_record(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    code, folder = train("delayed", *EMULATED, *STEPS, "network.latency=2ms")
    assert code == 0
    assert "network.latency: a round trip takes" in capsys.readouterr().out
    code, plain = train("plain", *WORLD, *STEPS)
    assert code == 0
    assert_same(folder, plain, 10)
    told = summary(folder)["network"]
    assert told["by_class"] == summary(plain)["network"]["by_class"]
    assert told["latency"]["one_way_seconds"] == 0.002
    assert told["latency"]["round_trip_seconds"] >= 0.004
    assert summary(plain)["network"]["latency"] is None
    if has_netem():
        assert told["latency"]["relay"] is None
        return
    relay = told["latency"]["relay"]
    assert relay["bytes"] > told["bytes_total"]
    assert relay["cpu_seconds"] > 0
    assert 0 < relay["packets"] < relay["bytes"] / 66


@pytest.mark.slow
@pytest.mark.parametrize("latency", ["null", "20ms"])
def test_nothing_is_left_of_a_killed_run_and_the_machines_links_are_untouched(
    latency: str,
    small_rows: list[str],
    tmp_path: Path,
    short_folder: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TMPDIR", short_folder)  # what a killed program cannot remove stays here
    folder, links_before = tmp_path / "run", links()
    long = ("train.epochs=1000", "telemetry.every=1", f"hydra.run.dir={folder}")
    process = start((), *small_rows, *EMULATED, f"network.latency={latency}", *long)
    try:
        pids = started(process, folder)
        ours = family(process.pid)
        assert len({inside_of(pid) for pid in pids.values()}) == SIZE
        hub = 1
        assert len(network_namespaces(ours)) == SIZE + hub
        assert links() == links_before
    finally:
        process.kill()
        process.communicate()
    assert are_gone(ours, HANG_SECONDS)
    assert links() == links_before


@pytest.mark.slow
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="gives up a right of root"
)
def test_without_roots_rights_a_namespace_of_users_does(
    small_rows: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    arguments = (*small_rows, *EMULATED, *STEPS, f"hydra.run.dir={folder}")
    process = start(["setpriv", "--bounding-set=-sys_admin"], *arguments)
    text, _ = process.communicate(timeout=HANG_SECONDS)
    if "no permission to create network namespaces" in text:
        pytest.skip("this system has no user namespaces")
    assert process.returncode == 0, text
    assert summary(folder)["status"] == "complete"


@pytest.mark.slow
def test_a_machine_that_cannot_is_told_why(small_rows: list[str], tmp_path: Path) -> None:
    """In a user namespace that may make no network namespaces."""
    forbid = 'echo 0 > /proc/sys/user/max_net_namespaces && exec "$@"'
    users = ["unshare", "--map-root-user"]
    if subprocess.run([*users, "true"], capture_output=True).returncode:
        pytest.skip("this system has no user namespaces")
    prefix = [*users, "sh", "-c", forbid, "sh"]
    folder = tmp_path / "run"
    process = start(prefix, *small_rows, *EMULATED, f"hydra.run.dir={folder}")
    text, _ = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 5, text
    assert (
        "network=emulated: no permission to create network namespaces; needs root or user" in text
    )
    assert not folder.exists(), "no empty folder is left"


@pytest.mark.slow
def test_links_carry_what_is_counted_and_little_else(train: Train) -> None:
    """Each direction: between the bytes of the messages and 1.08 times those, of what acknowledges
    the other direction 4 %; a step that is on its way when training begins or ends may be missing.
    """
    steps = 30
    large = ("model=dlrm_paper", "train.batch_size=128", f"train.steps={steps}")
    code, folder = train("run", *EMULATED, *large, "network.rate=400mbit")
    assert code == 0
    told = summary(folder)
    timed = steps - WARMUP_STEPS
    for role in told["roles"].values():
        messages, sent = role["bytes_sent"], role["interface_bytes_sent"]
        acknowledged = 0.04 * role["interface_bytes_received"]
        assert messages * (1 - 1 / timed) <= sent, role
        assert sent <= 1.08 * messages * (1 + 1 / timed) + acknowledged, role
    network = told["network"]
    assert network["bytes_total"] == sum(one["bytes"] for one in network["by_class"].values())
    assert network["bytes_total"] <= network["interface_bytes"] <= 1.12 * network["bytes_total"]
