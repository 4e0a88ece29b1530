"""What can be typed and what cannot: messages.yaml has the one line that refuses it, or null."""

from pathlib import Path

import yaml

from dlrm_hybrid.config.compose import job_of
from dlrm_hybrid.types import ConfigError

ROWS = yaml.safe_load(Path(__file__).with_name("messages.yaml").read_text("utf-8"))


def faults(*overrides: str) -> list[str]:
    try:
        job_of(overrides)
    except ConfigError as error:
        head, *lines = str(error).splitlines()
        assert head == f"configuration: {len(lines)} fault{'s' * (len(lines) > 1)}"
        return [line.strip() for line in lines]
    return []


def test_what_is_typed_is_taken_or_refused_in_one_line() -> None:
    wanted = {
        typed: [told] if isinstance(told, str) else told or [] for typed, told in ROWS.items()
    }
    assert {typed: faults(*typed.split()) for typed in ROWS} == wanted
