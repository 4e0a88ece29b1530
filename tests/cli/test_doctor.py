import pytest

from dlrm_hybrid.__main__ import run
from dlrm_hybrid.doctor import checks
from dlrm_hybrid.doctor.checks import Level


def test_a_wrong_version_is_named_and_ends_with_5(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checks, "VERSIONS", {"torch": "1.0.0"})
    assert run(["dlrm_hybrid", "doctor"]) == 5
    report = capsys.readouterr().out
    assert "FAIL  packages" in report
    assert "1.0.0 is needed" in report
    assert "1 of these must be put right" in report


def test_a_broken_probe_is_a_finding_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken() -> checks.Check:
        raise OSError("no such device")

    monkeypatch.setattr(checks, "_vectors", broken)
    found = {check.name: check for check in checks.run_checks(checks.Path.cwd())}
    assert found["vector instructions"].level is Level.FAIL
    assert found["vector instructions"].detail == "OSError: no such device"
    assert found["memory"].level is not Level.FAIL
    assert len(found) == 12
