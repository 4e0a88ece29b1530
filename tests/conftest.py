"""One thread for everything, hypothesis profiles, real rows only from CRITEO_TRAIN_TXT."""

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, settings
from patience import PATIENT

gc.disable()  # until all is imported, which stays

settings.register_profile(
    "fixed",
    deadline=None,
    derandomize=True,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
# Many examples, others each time: python -m pytest --hypothesis-profile=fuzz (docs/development.md).
settings.register_profile(
    "fuzz", settings.get_profile("fixed"), derandomize=False, max_examples=20_000
)
# The same ones at each call, but more: make test-all; or few: make check.
settings.register_profile("thorough", settings.get_profile("fixed"), max_examples=300)
settings.register_profile("quick", settings.get_profile("fixed"), max_examples=20)
settings.load_profile("fixed")


def pytest_collection_finish() -> None:
    """Garbage is looked for among what tests make, not among what they have imported."""
    gc.enable()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def heed_ctrl_c() -> None:
    """A shell lets what it starts in the background ignore Ctrl-C, and all that this starts too."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def ranks_are_forked_with_kernels() -> Iterator[None]:
    """Kernels are read once, not by each of the hundreds of ranks that last a second."""
    preload, ensure_running = forkserver.set_forkserver_preload, forkserver.ensure_running

    def ensure_running_here() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
            ensure_running()

    def preload_here(names: list[str]) -> None:
        preload([*names, "loaded_kernels"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forkserver, "set_forkserver_preload", preload_here)
        patch.setattr(forkserver, "ensure_running", ensure_running_here)
        yield


@pytest.fixture(autouse=True)
def choices_from_outside_end_with_their_test() -> Iterator[None]:
    """They are loaded once in a process, and then named among the others in messages."""
    yield
    if outside := sys.modules.get("dlrm_hybrid.config.outside"):
        outside._loaded.clear()


@pytest.fixture(scope="session")
def criteo_rows() -> Path:
    """The file of real rows; tests that need it skip without it."""
    name = os.environ.get("CRITEO_TRAIN_TXT")
    if not name:
        pytest.skip("needs real rows: set CRITEO_TRAIN_TXT to Criteo's train.txt (or .gz)")
    path = Path(name)
    assert path.is_file(), f"CRITEO_TRAIN_TXT={name} is not a file"
    return path


@pytest.fixture
def short_folder() -> Iterator[str]:
    """A temporary folder whose name leaves room for that of a socket, as `tmp_path` may not."""
    with TemporaryDirectory() as folder:
        yield folder


@pytest.fixture(scope="session")
def small_rows(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides for 7,000 synthetic rows, prepared once, and the small model: 93 steps of 64."""
    from dlrm_hybrid.cli.main import run

    folder = tmp_path_factory.mktemp("rows")
    overrides = [
        "data.rows=7000",
        f"data.prepared={folder / 'prepared'}",
        PATIENT,
        "data.processes=1",
        "model=dlrm_small",
        "train.batch_size=64",
        "telemetry.tensorboard=false",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run(["dlrm_hybrid", "prepare", *overrides]) == 0
    return overrides


@pytest.fixture
def train(small_rows: list[str], tmp_path: Path) -> Callable[..., tuple[int, Path]]:
    """Train on the small rows as the command line would: exit code and run folder."""
    from dlrm_hybrid.cli.main import run
    from dlrm_hybrid.config.overrides import override_text

    def train_here(name: str, *overrides: str) -> tuple[int, Path]:
        folder = tmp_path / name
        run_folder = override_text("hydra.run.dir", str(folder))
        return run(["dlrm_hybrid", "train", *small_rows, run_folder, *overrides]), folder

    return train_here


@pytest.fixture
def trained(train: Callable[..., tuple[int, Path]]) -> Callable[..., Path]:
    """Likewise, of runs that end well: the folder."""

    def train_well(name: str, *overrides: str) -> Path:
        code, folder = train(name, *overrides)
        assert code == 0
        return folder

    return train_well
