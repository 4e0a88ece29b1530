"""What the environment of a launcher means, and which worlds it fits."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from free_ports import free_port
from patience import HANG_SECONDS

from dlrm_hybrid.cli.main import run
from dlrm_hybrid.cli.terminal import quiet
from dlrm_hybrid.cli.verbs.train import TerminalView
from dlrm_hybrid.comm.rendezvous import reach_store
from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.run.launch import member as launched
from dlrm_hybrid.run.launch.environment import Launch, find_launch
from dlrm_hybrid.run.launch.member import Part, open_rendezvous, own_network, tell_failure
from dlrm_hybrid.run.launch.rules import (
    check_versions,
    check_world,
    in_plain_text,
    own_rank,
    own_versions,
)
from dlrm_hybrid.run.request import Arguments, Request, TrainTask
from dlrm_hybrid.types import ConfigError, DataError, ExitCode, ResourceError, RunFailedError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "7",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "3",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
SLURM = {
    "SLURM_JOB_ID": "10007",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NODELIST": "node[03-04]",
}
OPERATOR = {key: TORCHRUN[key] for key in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
WITHOUT_SERVERS = ("+experiment=dp_levels", "parallel.machines=2")
TWO = (*WITHOUT_SERVERS, "parallel.servers=2")
NOT_SHOWN = (quiet(), TerminalView(quiet()))


def launch(**changes: str) -> Launch:
    found = find_launch({**TORCHRUN, **changes})
    assert found is not None
    return found


def config(*overrides: str) -> Config:
    return validate(values_of(overrides))


def test_torchrun_says_who_is_who() -> None:
    assert launch() == Launch(
        job="",
        size_key="WORLD_SIZE",
        rank=5,
        size=7,
        local_rank=1,
        node="1",
        machine=1,
        num_nodes=3,
        host="10.0.0.1",
        port=29400,
        rank_0_serves=False,
        restarts=2,
    )
    assert not launch(RANK="0").serves_store


def test_an_operator_sets_the_same_variables_and_serves_no_store() -> None:
    found = [find_launch({**OPERATOR, "RANK": rank}) for rank in "06"]
    assert [one and (one.serves_store, one.local_rank, one.node) for one in found] == [
        (True, 0, "0"),
        (False, 0, "6"),
    ]


def test_ranks_that_meet_on_loopback_are_on_one_machine() -> None:
    keys = ("RANK", "WORLD_SIZE", "MASTER_PORT")
    environ = {key: TORCHRUN[key] for key in keys} | {"MASTER_ADDR": "127.0.0.1"}
    found = find_launch(environ)
    assert found is not None
    assert found.num_nodes == 1


def test_slurm_says_who_is_who() -> None:
    found = find_launch(SLURM)
    assert found is not None
    assert (found.rank, found.size, found.num_nodes, found.node) == (0, 7, 2, "0")
    assert (found.host, found.port, found.serves_store) == ("node03", 20_007, True)
    named = find_launch({**SLURM, "MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "4000"})
    assert named is not None
    assert (named.host, named.port) == ("10.0.0.9", 4000)
    one_node = find_launch({**SLURM, "SLURM_NNODES": "1"})
    assert one_node is not None
    assert one_node.host == "127.0.0.1"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a7", "a7"), ("a1,b2", "a1"), ("rack[09,11-12]-x,b", "rack09-x"), ("n[1-2].site", "n1.site")],
)
def test_rank_0_is_on_the_first_machine_of_the_list(nodes: str, first: str) -> None:
    found = find_launch({**SLURM, "SLURM_JOB_NODELIST": nodes})
    assert found is not None
    assert found.host == first


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "2"},
        {**SLURM, "SLURM_NTASKS": "1"},
        {key: SLURM[key] for key in SLURM if key != "SLURM_STEP_ID"} | {"ENVIRONMENT": "BATCH"},
    ],
    ids=["nothing", "no store", "one task", "batch script"],
)
def test_without_a_launcher_nothing_is_found(environ: dict[str, str]) -> None:
    assert find_launch(environ) is None


def test_a_variable_that_is_no_number_is_told() -> None:
    with pytest.raises(ConfigError, match="WORLD_SIZE = seven: must be a number"):
        launch(WORLD_SIZE="seven")
    with pytest.raises(ConfigError, match="MASTER_ADDR: is not set"):
        find_launch({key: SLURM[key] for key in SLURM if key != "SLURM_JOB_NODELIST"})


TORCHRUN_OF_TWO = (
    "torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-id=1 "
    "--rdzv-endpoint=HOST:29400 -m dlrm_hybrid train +experiment=dp_levels network.bind=NETWORK "
    "network.keys=keys.json hydra.run.dir=FOLDER"
)
SRUN_OF_TWO = (
    "srun --nodes=2 --ntasks-per-node=2 --kill-on-bad-exit=1 python -m dlrm_hybrid train "
    "+experiment=dp_levels network.bind=NETWORK "
)
HYBRID, KEYS, BIND = "parallel=hybrid", "network.keys=keys.json", "network.bind=10.0.0.0/24"
SERVED = ("embedding=served", "parallel.table_servers=2")
ELASTIC = ("sync=async", *SERVED, "parallel.elastic=true", "parallel.cuts=[]", "parallel.servers=3")
OF_SEVEN = "WORLD_SIZE = 7: parallel.trainers = 2, parallel.cuts = [bottom.2, top.2] (3 stages) and"
MULTIPLE = "launchers start as many processes on each machine, so it must be a multiple of "


@pytest.mark.parametrize(
    ("overrides", "changes", "fault"),
    [
        (
            (HYBRID, "parallel.servers=2", BIND, KEYS),
            {},
            f"{OF_SEVEN} parallel.servers = 2 make 8 processes",
        ),
        (
            (HYBRID, *SERVED, BIND, KEYS),
            {},
            f"{OF_SEVEN} parallel.servers = 1, parallel.table_servers = 2 make 9 processes",
        ),
        (
            (HYBRID, KEYS),
            {},
            "network.bind = null: 3 machines cannot connect over loopback",
        ),
        (
            (HYBRID, *ELASTIC, BIND, KEYS),
            {},
            "parallel.elastic = true: not available where a launcher starts the ranks",
        ),
        (("parallel=single", KEYS), {}, "WORLD_SIZE = 7: parallel=single with"),
        (
            (HYBRID, "parallel.world=in_process", KEYS),
            {},
            "WORLD_SIZE = 7: parallel=hybrid with parallel.world=in_process is one process",
        ),
        (
            (HYBRID, KEYS),
            {"WORLD_SIZE": "1", "RANK": "0"},
            "WORLD_SIZE = 1: parallel.trainers = 2",
        ),
        (
            TWO,
            None,
            "parallel.machines = 2: this command starts processes on this machine alone; start on "
            f"each machine: {TORCHRUN_OF_TWO}; or try it here with network=emulated",
        ),
        (
            TWO,
            {},
            "WORLD_SIZE = 7: parallel.trainers = 2, parallel.cuts = [] (1 stages) and "
            f"parallel.servers = 2 make 4 processes; start on each machine: {TORCHRUN_OF_TWO}",
        ),
        (
            (*TWO, "parallel.trainers=3"),
            None,
            f"parallel.trainers = 3: {MULTIPLE}parallel.machines = 2",
        ),
        (
            (*WITHOUT_SERVERS, "parallel.servers=1"),
            {"WORLD_SIZE": "3"},
            f"parallel.servers = 1: {MULTIPLE}parallel.machines = 2",
        ),
        ((HYBRID, "network=emulated"), {}, "network = emulated: "),
    ],
)
def test_a_world_that_does_not_fit_is_refused_with_the_command_that_does(
    overrides: Sequence[str], changes: dict[str, str] | None, fault: str
) -> None:
    given = None if changes is None else launch(**changes)
    with pytest.raises(ConfigError) as caught:
        check_world(config(*overrides), given, ("+experiment=dp_levels",))
    _, *lines = str(caught.value).splitlines()
    # Two machines without an address cannot connect, too.
    assert len(lines) == 1 + (tuple(overrides) == TWO and given is not None)
    assert lines[0].strip().startswith(fault)
    assert "torchrun" not in fault or lines[0].strip() == fault


def test_in_an_allocation_of_slurm_the_command_is_one_of_srun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with pytest.raises(ConfigError) as caught:
        check_world(config(*TWO), None, ("+experiment=dp_levels",))
    assert f"start once in this allocation: {SRUN_OF_TWO}" in caught.value.args[0]


def test_worlds_that_fit_are_let_pass() -> None:
    keys = ["network.keys=keys.json", "network.bind=10.0.0.0/24"]
    check_world(config("parallel=hybrid", *keys), launch(), ())
    check_world(config("parallel=hybrid"), launch(LOCAL_WORLD_SIZE="7"), ())
    check_world(config("parallel=single"), launch(WORLD_SIZE="1", RANK="0"), ())
    check_world(config("parallel=hybrid", "network=emulated", "parallel.machines=2"), None, ())
    check_world(config(*TWO, *keys), launch(WORLD_SIZE="4", LOCAL_WORLD_SIZE="2"), ())


@pytest.mark.parametrize(
    ("overrides", "changes", "is_exposed"),
    [
        ((HYBRID,), {}, True),
        ((HYBRID,), {"LOCAL_WORLD_SIZE": "7"}, False),
        ((HYBRID, *SERVED), {}, False),
        ((HYBRID, "parallel.trainers=1"), {}, False),
    ],
)
def test_tables_that_cross_machines_in_plain_text_are_told(
    overrides: Sequence[str], changes: dict[str, str], is_exposed: bool
) -> None:
    text = in_plain_text(config(*overrides, KEYS, BIND), launch(**changes))
    assert (text is not None and "plain TCP" in text) == is_exposed


@pytest.mark.parametrize(
    ("world", "expected"),
    [
        (TWO, [[0, 2], [1, 3]]),
        (WITHOUT_SERVERS, [[0], [1]]),
        ((*TWO, "parallel.trainers=4"), [[0, 2, 4], [1, 3, 5]]),
        ((*TWO, "parallel.cuts=[bottom.2]"), [[0, 1, 4], [2, 3, 5]]),
        (("+experiment=data_parallel", *TWO[1:], "embedding=served"), [[0, 2, 4], [1, 3, 5]]),
    ],
)
def test_every_process_gets_a_rank_of_its_machine(
    world: Sequence[str], expected: list[list[int]]
) -> None:
    """torchrun, SLURM that deals tasks in turn, and an operator that says only who is which."""
    given, each = config(*world), len(expected[0])
    torchrun = [
        [
            launch(RANK=str(machine * each + one), GROUP_RANK=str(machine), LOCAL_RANK=str(one))
            for one in range(each)
        ]
        for machine in range(2)
    ]
    in_turn = [
        [
            find_launch(
                {
                    **SLURM,
                    "SLURM_PROCID": str(2 * one + machine),
                    "SLURM_NODEID": str(machine),
                    "SLURM_LOCALID": str(one),
                }
            )
            for one in range(each)
        ]
        for machine in range(2)
    ]
    operator = [
        [
            find_launch({**OPERATOR, "RANK": str(machine * each + one), "WORLD_SIZE": "9"})
            for one in range(each)
        ]
        for machine in range(2)
    ]
    for machines in (torchrun, in_turn, operator):
        found = [[own_rank(given, one, ()) for one in launches if one] for launches in machines]
        assert found == expected
    assert own_rank(config("parallel=hybrid"), launch(RANK="5", GROUP_RANK="1"), ()) == 5


def test_a_machine_with_too_many_processes_is_named() -> None:
    third = launch(RANK="2", WORLD_SIZE="4", GROUP_RANK="0", LOCAL_RANK="2", LOCAL_WORLD_SIZE="3")
    with pytest.raises(ConfigError, match="parallel.machines = 2: each has 2 .* process 2 of mach"):
        own_rank(config(*TWO), third, ())


def test_the_network_is_each_machines_own() -> None:
    given = config("parallel=hybrid", "network.bind=10.0.0.1", "network.keys=keys.json")
    own = own_network(given, ["parallel.trainers=9", "network.bind=10.0.0.2"])
    assert (own.network.bind, own.network.keys) == ("10.0.0.2", "keys.json")
    assert own.parallel == given.parallel
    assert own_network(given, ["++network.bind=10.0.0.2"]).network.bind == "10.0.0.2"
    assert own_network(given, ['network.keys="my, keys"']).network.keys == "my, keys"
    with pytest.raises(ConfigError, match="network.keys=my, keys: several values"):
        own_network(given, ["network.keys=my, keys"])


def test_a_store_on_loopback_is_refused_for_several_machines() -> None:
    found = find_launch({**SLURM, "MASTER_ADDR": "localhost", "MASTER_PORT": "0"})
    assert found is not None
    with pytest.raises(ConfigError, match="MASTER_ADDR = localhost: is loopback"):
        open_rendezvous(found)


def member(rank: int, port: int, **changes: str) -> Launch:
    """Of a job of two processes on this machine, without a launcher's store."""
    changes = {"SLURM_NTASKS": "2", "SLURM_NNODES": "1", "MASTER_PORT": str(port), **changes}
    found = find_launch({**SLURM, "SLURM_PROCID": str(rank), **changes})
    assert found is not None
    return found


def test_of_two_jobs_with_one_port_the_second_is_told_and_the_first_not_harmed() -> None:
    port = free_port()
    first = open_rendezvous(member(0, port))
    with pytest.raises(ResourceError, match=f"MASTER_PORT = {port}: rank 0 cannot listen there: "):
        open_rendezvous(member(0, port, SLURM_JOB_ID="20007"))
    told = r"this is rank 1 of 2 of job 20007\.0, but job 10007\.0 with 2 processes uses this port"
    with pytest.raises(ConfigError, match=told):
        open_rendezvous(member(1, port, SLURM_JOB_ID="20007"))
    assert str(open_rendezvous(member(1, port))) == str(first)
    with pytest.raises(ConfigError, match="another rank 1 has already joined; give each job its"):
        open_rendezvous(member(1, port))
    assert first.failure() is None


def test_a_rank_that_comes_after_a_failure_tells_it_and_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 waits until all who have joined, or will, have left."""
    monkeypatch.setattr(launched, "die_with_parent", lambda parent: None)  # these tests' own
    port = free_port()
    first = open_rendezvous(member(0, port))
    tell_failure(first, ExitCode.FAILED, "nothing goes")
    with pytest.raises(RunFailedError, match="nothing goes"):
        launched.run(member(1, port), Arguments(overrides=[]), *NOT_SHOWN)
    assert first.read("left-1.json") is not None


def test_what_means_something_to_a_sweep_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launched, "die_with_parent", lambda parent: None)  # these tests' own
    monkeypatch.setattr(launched, "LEAVE_SECONDS", 0.0)
    with pytest.raises(ConfigError, match="sweep.jobs=4: only applies to a sweep; add -m"):
        launched.run(member(0, free_port()), Arguments(overrides=["sweep.jobs=4"]), *NOT_SHOWN)


def test_tables_larger_than_the_memory_of_one_machine_are_refused(
    monkeypatch: pytest.MonkeyPatch, small_rows: list[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(launched, "die_with_parent", lambda parent: None)  # these tests' own
    monkeypatch.setattr(launched, "LEAVE_SECONDS", 0.0)
    for name in ("virtual_memory", "swap_memory"):
        memory = getattr(psutil, name)()._replace(total=0)
        monkeypatch.setattr(psutil, name, lambda memory=memory: memory)
    world = ("parallel=hybrid", "parallel.trainers=1", "parallel.cuts=[]")
    given = Arguments(overrides=[*small_rows, *world, f"hydra.run.dir={tmp_path / 'run'}"])
    with pytest.raises(ResourceError, match="embedding tables of"):
        launched.run(member(0, free_port()), given, *NOT_SHOWN)


def part_of(rank: int, folder: Path) -> Part:
    """Of a run of three ranks, whose rendezvous this process serves."""
    place = member(rank, free_port(), SLURM_NTASKS="3")
    rendezvous = open_rendezvous(replace(place, rank=0))
    request = Request(config("parallel=hybrid", "parallel.cuts=[]"), {}, folder, ())
    task = TrainTask(
        run_folder=str(folder),
        prepared="",
        resume_from=None,
        rank=rank,
        attempt=0,
        rendezvous=str(rendezvous),
    )
    return Part(launch=place, request=request, task=task, rendezvous=rendezvous)


def test_a_rank_whose_log_cannot_be_written_tells_all_others(tmp_path: Path) -> None:
    part = part_of(1, tmp_path)
    (tmp_path / "log" / "worker-1.0.log").mkdir(parents=True)
    with pytest.raises(RunFailedError, match=r"worker-1\.0 .*log: Is a directory") as caught:
        launched.take_part(part, NOT_SHOWN[1])
    failure = part.rendezvous.for_all_attempts().failure()
    assert failure is not None
    assert failure.exit_code == caught.value.exit_code == ExitCode.RESOURCES


def test_cores_of_ranks_that_are_bound_to_some_are_added_up(tmp_path: Path) -> None:
    part = part_of(0, tmp_path)
    for rank, (node, cores) in enumerate([("a", [0, 1]), ("a", [1, 2]), ("b", [0])]):
        machine = {"node": node, "cores": cores, "process": rank}
        part.rendezvous.put(f"machine-{rank}.json", json.dumps(machine))
    assert launched._cores(part) == 4


def test_ranks_of_other_versions_are_refused() -> None:
    own = own_versions()
    check_versions(3, own, dict(own))
    other = {**own, "torch": "2.12.0", "wire format": "9"}
    with pytest.raises(ConfigError) as caught:
        check_versions(3, own, other)
    text = str(caught.value)
    assert "configuration: 2 faults\n" in text
    assert f"has torch {own['torch']}, rank 0 has 2.12.0: all ranks need the same" in text
    assert "rank 3 on " in text


def test_one_process_of_a_launcher_is_refused_a_world_of_several(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path
) -> None:
    for key, value in {**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"}.items():
        monkeypatch.setenv(key, value)
    argv = ["dlrm_hybrid", "train", "parallel=hybrid", f"hydra.run.dir={tmp_path / 'run'}"]
    assert run(argv) == 2
    assert "WORLD_SIZE = 1: parallel.trainers = 2" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("rank", "note"), [("0", "not read by `train`: report.output=x.html\n"), ("1", "")]
)
def test_rank_0_alone_notes_what_is_not_read(
    rank: str, note: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for key, value in {**TORCHRUN, "RANK": rank}.items():
        monkeypatch.setenv(key, value)
    for key in ("OMP_NUM_THREADS", "TORCH_CPP_LOG_LEVEL"):  # the program sets what is missing
        monkeypatch.setenv(key, "1")
    monkeypatch.setattr(launched, "run", lambda *_: 0)
    assert run(["dlrm_hybrid", "train", "report.output=x.html"]) == 0
    assert capsys.readouterr().err == note


def test_a_restart_finds_its_folder_whatever_it_is_called_and_leaves_none_that_is_empty(
    monkeypatch: pytest.MonkeyPatch, small_rows: list[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(launched, "die_with_parent", lambda parent: None)  # these tests' own
    monkeypatch.setattr(launched, "LEAVE_SECONDS", 0.0)
    folder = tmp_path / "it's (started), é = 1"
    port = free_port()
    first = open_rendezvous(member(0, port))
    first.for_all_attempts().put(launched.RUN_FOLDER, str(folder))
    world = ("parallel=hybrid", "parallel.trainers=1", "parallel.cuts=[]")
    given = Arguments(overrides=[*small_rows, *world, "checkpoint.resume=nope"])
    again = replace(member(0, port), rank_0_serves=False, restarts=1)
    with pytest.raises(DataError, match="nope: no checkpoint found"):
        launched.run(again, given, *NOT_SHOWN)
    assert not folder.exists()


def test_a_folder_that_cannot_be_made_is_told_to_all_ranks_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launched, "die_with_parent", lambda parent: None)  # these tests' own
    monkeypatch.setattr(launched, "LEAVE_SECONDS", 0.0)
    port = free_port()
    serving = open_rendezvous(replace(member(0, port), restarts=1))
    assert serving.failure() is None
    world = ("parallel=hybrid", "parallel.trainers=1", "parallel.cuts=[]")
    given = Arguments(overrides=[*world, "hydra.run.dir=/dev/null/run"])
    with pytest.raises(ResourceError, match="/dev/null/run: Not a directory"):
        launched.run(replace(member(0, port), rank_0_serves=False), given, *NOT_SHOWN)
    other = reach_store("127.0.0.1", port, "dlrm_hybrid/0", HANG_SECONDS)
    failure = other.failure()
    assert failure is not None and failure.exit_code == 5
