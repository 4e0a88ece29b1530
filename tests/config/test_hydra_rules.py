"""Nothing that Hydra could run is taken from the command line."""

import pickle
from pathlib import Path

import pytest

from dlrm_hybrid.cli.main import run
from dlrm_hybrid.config.compose import check
from dlrm_hybrid.types import ConfigError

ALLOWED = "of Hydra's own keys only hydra.run.dir, hydra.sweep.dir, hydra.sweeper.params may be set"


class Harm:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("+hydra.callbacks.x._target_=os.system", "+hydra.callbacks.x._target_"),
        ("++hydra.callbacks={x:{_target_:os.system}}", "++hydra.callbacks"),
        ("hydra={launcher:{_target_:os.system}}", "hydra"),
        ("hydra.sweeper._target_=os.system", "hydra.sweeper._target_"),
        ("hydra/launcher=basic", "hydra/launcher"),
        ("+hydra/callbacks=x", "+hydra/callbacks"),
        ("+model@hydra.callbacks=dlrm_small", "+model@hydra.callbacks"),
        ("~hydra.run.dir", "~hydra.run.dir"),
        ("hydra.mode=MULTIRUN", "hydra.mode"),
    ],
)
def test_hydras_own_keys_are_refused(override: str, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        check([override, "train.epochs=0"])
    assert str(error.value).splitlines() == [
        "configuration: 2 faults",
        f"  {told}: {ALLOWED}",
        "  train.epochs = 0: must be greater than or equal to 1",
    ]


@pytest.mark.parametrize(
    "override",
    ["hydra.run.dir=x", "hydra.sweep.dir=x", "hydra.sweeper.params=null", "data.raw=hydra.x"],
)
def test_others_are_not(override: str) -> None:
    try:
        check([override])
    except ConfigError as error:
        assert ALLOWED not in str(error)


@pytest.mark.parametrize("asks", [(), ("--help",), ("--cfg", "job"), ("--info",), ("-m",)])
def test_no_file_of_a_flag_is_unpickled(
    asks: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harm = tmp_path / "harm"
    (tmp_path / "config.pickle").write_bytes(pickle.dumps(Harm(harm)))
    given = [*asks, "--experimental-rerun", str(tmp_path / "config.pickle")]
    code = run(["dlrm_hybrid", "train", f"hydra.run.dir={tmp_path / 'run'}", *given])
    assert code == 2
    assert "--experimental-rerun: is not for use here" in capsys.readouterr().err
    assert not harm.exists()
    pickle.loads((tmp_path / "config.pickle").read_bytes())
    assert harm.exists()


@pytest.mark.parametrize("flag", ["--config-dir", "--config-name", "--config-path"])
def test_no_configuration_from_elsewhere(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["dlrm_hybrid", "doctor", flag, str(tmp_path)]) == 2
    assert f"{flag}: is not for use here" in capsys.readouterr().err
