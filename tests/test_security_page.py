"""The page on security names tests that are there."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_test_that_is_named_exists() -> None:
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+/test_\w+\.py)`", text))
    assert len(named) > 15
    assert [name for name in sorted(named) if not (ROOT / "tests" / name).is_file()] == []


def test_every_claim_names_one() -> None:
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    claims = [line for line in text.splitlines() if line.startswith("| ") and "claim" not in line]
    assert len(claims) > 10
    assert [line for line in claims if not re.search(r"/test_\w+\.py`", line)] == []
