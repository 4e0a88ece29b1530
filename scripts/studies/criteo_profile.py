"""Measure raw Criteo rows and write the aggregate profile that synthetic rows are drawn from.

    python scripts/studies/criteo_profile.py train.txt --out criteo_kaggle.json

When the rows are only a sample, `--cardinalities` takes the published number of categories of each
column, a missing one included; the part of the frequency curve that the sample cannot show is
extrapolated to it. The profile holds counts and shares: no row and no category value.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dlrm_hybrid.data import calibrate, curves, measure, profile, synthetic
from dlrm_hybrid.rng import fold
from dlrm_hybrid.types import DlrmError

# Columns (0 … 25) whose latent vectors the teacher multiplies: small tables that carry most rows
# in a few categories, so that a model meets each pair often enough to learn its product.
PAIRS = ((5, 13), (13, 16), (16, 22), (5, 22), (24, 16), (19, 13))


def main() -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("raw", nargs="+", type=Path, help="files in the official row format")
    parser.add_argument("--out", required=True, type=Path, help="the profile, JSON")
    parser.add_argument("--cardinalities", help="26 published numbers joined by '-'")
    parser.add_argument("--source", default="unnamed rows", help="what the rows are, in words")
    parser.add_argument("--head-ranks", type=int, default=64, help="ranks with own effects")
    parser.add_argument("--log-loss", type=float, default=0.45, help="of the teacher, nats")
    parser.add_argument(
        "--mixture",
        type=float,
        nargs=3,
        default=(1.0, 0.8, 0.8),
        help="deviations of integer, categorical and interaction effects, up to a factor",
    )
    options = parser.parse_args()
    try:
        made = _measure(options)
    except DlrmError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
    options.out.write_text(profile.dumps(made), encoding="utf-8")
    scores = synthetic.teacher_scores(range(200_000), 1, profile.read(options.out))
    print(f"{options.out}: {options.out.stat().st_size} bytes, digest {made.digest}")
    print(f"teacher on 200000 rows of seed 1: {scores}")
    return 0


def _measure(options: argparse.Namespace) -> profile.Profile:
    seen = measure.count(options.raw, lambda rows: print(f"{rows} rows", file=sys.stderr))
    known = measure.seen_cardinalities(seen)
    published = tuple(int(text) for text in (options.cardinalities or "").split("-") if text)
    if published and len(published) != len(known):
        raise DlrmError(f"--cardinalities: {len(published)} numbers, {len(known)} are needed")
    curve = "a Zipf-Mandelbrot curve up to the published cardinality, fitted to the categories seen"
    tail = curve if published else "as measured"
    made = profile.Profile(
        format=profile.FORMAT,
        provenance={
            "source": options.source,
            "rows": seen.rows,
            "clicks": seen.clicks,
            "categories_seen": known,
            "tail": f"ranks seen fewer than {curves.HEAD_COUNT} times: {tail}",
            "teacher": "made up; only its click rate is measured",
            "integers": f"cut {curves.TAIL_ROWS} rows before both extremes",
        },
        click_rate=seen.clicks / seen.rows,
        cardinalities=published or known,
        integers=measure.integer_columns(seen),
        categoricals=measure.categorical_columns(seen, published or known),
        teacher=calibrate.blank_teacher(fold(0, "teacher"), options.head_ranks, PAIRS),
    )
    return calibrate.calibrated(made, tuple(options.mixture), options.log_loss)


if __name__ == "__main__":
    sys.exit(main())
