"""Nothing that Hydra could run is reached, whatever is typed, set or lying about."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from patience import HANG_SECONDS

from dlrm_hybrid.cli.main import run
from dlrm_hybrid.config import compose
from dlrm_hybrid.types import ConfigError

ROOT = Path(__file__).parent.parent.parent
# Each would make `canary` if somebody made an object of it.
TARGETS = """\
# @package _global_
_target_: pathlib.Path.touch
train: {{_target_: os.mkdir, path: canary}}
hydra:
  searchpath: [{folder}]
  mode: MULTIRUN
  callbacks:
    x: {{_target_: os.mkdir, path: canary}}
  launcher: {{_target_: hydra_plugins.canary.Plugin}}
  sweeper: {{_target_: hydra_plugins.canary.Plugin}}
  job_logging:
    version: 1
    root: {{handlers: [x]}}
    handlers: {{x: {{class: logging.FileHandler, filename: canary}}}}
"""
PLUGIN = """\
from pathlib import Path
Path("canary").touch()
"""


class Harm:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


@pytest.mark.parametrize(
    ("override", "section"),
    [
        ("+data@_global_.hydra.callbacks.x=synthetic", "hydra.callbacks"),
        ("+schedule@_global_.hydra.job.env_set=gpipe", "hydra.job"),
        ("+hydra.callbacks.x._target_=os.mkdir", "hydra.callbacks"),
        ("+hydra.job.env_set.LD_PRELOAD=x", "hydra.job"),
        ("hydra.launcher._target_=os.mkdir", "hydra.launcher"),
        ("hydra.sweeper.max_batch_size=1", "hydra.sweeper"),
        ("hydra.mode=MULTIRUN", "hydra.mode"),
    ],
)
def test_the_composed_tree_is_checked_too(
    override: str, section: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What no rule for single overrides sees is seen in what they lead to."""
    monkeypatch.setattr(compose, "override_fault", lambda *_, **__: None)
    with pytest.raises(ConfigError) as error:
        compose.job_of([override])
    told = f"  {override}: Hydra's own settings cannot be changed ({section})"
    assert str(error.value).splitlines()[1:] == [told]


@pytest.fixture
def booby_trapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder full of what would make `canary` if any of it were used."""
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "evil.yaml").write_text(TARGETS.format(folder=folder))
    for name in ("config", "hydra/launcher/evil", "experiment/evil", "model/evil"):
        path = folder / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(TARGETS.format(folder=folder))
    (folder / "hydra_plugins").mkdir()
    (folder / "hydra_plugins" / "canary.py").write_text(PLUGIN)
    (folder / "evil.py").write_text(PLUGIN)
    (folder / "config.pickle").write_bytes(pickle.dumps(Harm(folder / "canary")))
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    return folder


WAYS = (
    ("+experiment=../../{here}/evil",),
    ("+experiment={here}/evil",),
    ("model=../../{here}/evil",),
    ("model={here}/model/evil",),
    ("+experiment=[baseline,../../{here}/evil]",),
    ("-m", "+experiment=baseline,../../{here}/evil"),
    ("-m", "+experiment=glob(b*,exclude=x)", "hydra.searchpath=[file://{here}]"),
    ("hydra.searchpath=[file://{here}]", "+experiment=evil"),
    ("'hydra.searchpath'=[file://{here}]", "+experiment=evil"),
    ("+hydra/launcher=evil",),
    ("+hydra/callbacks=../../{here}/evil",),
    ("hydra/sweeper=../../{here}/evil", "-m"),
    ("+_target_=os.mkdir", "+path=canary"),
    ("++_target_=os.mkdir",),
    ("+train._target_=os.mkdir", "+train.path=canary"),
    ("train={{_target_:os.mkdir,path:canary}}",),
    ("data.raw={{_target_:os.mkdir,path:canary}}",),
    ("gradient.hard={{_target_:os.mkdir,path:canary}}",),
    ("-m", "hydra.sweeper.params={{hydra.launcher._target_:evil.x}}"),
    ("-m", "++hydra.sweeper.params={{hydra.launcher._target_:evil.x}}"),
    ("-m", "hydra.sweeper.params.+experiment=../../{here}/evil"),
    ("+model@_global_.hydra.launcher=dlrm_small", "-m"),
    ("+data@_global_.hydra.sweeper=synthetic", "-m", "train.seed=1,2"),
    ("--config-dir", "{here}"),
    ("-cd", "{here}", "+experiment=evil"),
    ("--config-dir={here}",),
    ("--config-path", "{here}"),
    ("-cp={here}",),
    ("--config-name", "evil"),
    ("-cn", "../{here}/evil"),
    ("--experimental-rerun", "{here}/config.pickle"),
    ("--experimental-rerun={here}/config.pickle",),
    ("--info", "all", "+experiment=../../{here}/evil"),
    ("--info",),
    ("--hydra-help",),
    ("--run", "+experiment={here}/evil"),
    ("--cfg", "all", "+experiment=../../{here}/evil"),
    ("--cfg", "hydra", "--resolve", "hydra.searchpath=[{here}]"),
    ("--cfg", "job", "--package", "hydra.launcher", "hydra/launcher=evil"),
    ("--cfg", "job", "--resolve", "name=${{hydra:launcher._target_}}"),
    ("name=${{oc.create:{{_target_:os.mkdir}}}}",),
    ("--package", "_global_.hydra", "hydra.launcher=evil"),
    ("conf={here}", "+experiment=evil"),
    ("-m", "conf={here}", "+experiment=evil,baseline"),
    ("conf={here}", "model=evil"),
    ("conf={here}", "hydra/launcher=evil"),
    ("-sc", "query=evil", "+experiment=../../{here}/evil"),
    ("-sc", "install=../../{here}/evil"),
)


@pytest.mark.parametrize("way", WAYS, ids=" ".join)
def test_no_target_callback_launcher_or_sweeper_of_a_users_is_reached(
    way: tuple[str, ...], booby_trapped: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = [text.format(here=booby_trapped) for text in way]
    assert run(["dlrm_hybrid", "train", *given]) == 2
    told = capfd.readouterr()
    assert told.err.startswith("configuration: ")
    assert "Traceback" not in told.err
    assert told.out == ""
    assert not (booby_trapped / "canary").exists()
    assert not (booby_trapped / "runs").exists()


def test_nothing_that_lies_about_is_run_by_a_good_command(booby_trapped: Path) -> None:
    """Neither a plugin in the working folder nor what HYDRA_* names; in a process of its own."""
    evil = {"HYDRA_MAIN_MODULE": "evil.x", "HYDRA_CONFIG_PATH": str(booby_trapped)}
    evil |= {"HYDRA_FULL_ERROR": "1", "HYDRA_LAUNCHER": "evil", "PYTHONPATH": str(ROOT)}
    evil |= {"HYDRA_INSTANTIATE_ALLOWLIST_OVERRIDE": "*"}
    done = subprocess.run(
        [sys.executable, "-m", "dlrm_hybrid", "train", "--cfg", "all"],
        env={**os.environ, **evil},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert not (booby_trapped / "canary").exists()
