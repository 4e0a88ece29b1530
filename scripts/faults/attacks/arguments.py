"""Attacks by what is typed on the command line."""

from __future__ import annotations

from pathlib import Path

from .base import Attack, expect, program


def _unknown_key(folder: Path) -> str:
    ended = program(["train", "optimizer.lrr=0.1"], folder)
    expect(ended.code == 2, f"exit code {ended.code}")
    expect("optimizer.lr?" in ended.errors, ended.errors)
    return ended.errors.strip().splitlines()[-1].strip()


ATTACKS = (Attack("unknown-key", "exit 2, the key that was meant", _unknown_key),)
