"""Attacks from public bug reports of like programs, with invented rows: input, command, outcome."""

from __future__ import annotations

import bz2
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

from dlrm_hybrid.data.sources.arrow import pa, parquet

from .base import Case

ROWS = 400
PARTS = "split: {by: fraction, validation: 0.1, test: 0.1, seed: 0}\n"
ALL = f"vocabulary: all\n{PARTS}"
PREPARE = "prepare data=table data.schema=schema.yaml"
GUESS = "prepare data=table data.schema=guessed.yaml data.guess"
TRAIN = (
    "train data=table data.schema=schema.yaml model=dlrm_small telemetry.tensorboard=false "
    "train.batch_size=64 train.steps=2 data.processes=1"
)
Row = Mapping[str, Any]
Make = Callable[[Path], object]


def _rows(seed: int = 0, **columns: Callable[[int], Any]) -> list[dict[str, Any]]:
    """Rows of a label, a number and these columns, which are functions of the row's number."""
    return [
        {"y": (number * 7919 + seed) % 1013 % 2, "x": (number * 104729 + seed) % 1000 / 1000}
        | {name: of(number) for name, of in columns.items()}
        for number in range(ROWS)
    ]


def _csv(rows: Sequence[Row], file: str, separator: str = ",", header: bool = True) -> Make:
    lines = [separator.join(rows[0])] * header
    lines += [separator.join(str(value) for value in row.values()) for row in rows]
    return _text(file, "\n".join(lines) + "\n")


def _parquet(rows: Sequence[Row], file: str, types: Mapping[str, Any] | None = None) -> Make:
    def make(folder: Path) -> None:
        known = types or {}
        table = pa.table(
            {name: pa.array([row[name] for row in rows], known.get(name)) for name in rows[0]}
        )
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(table, folder / file)

    return make


def _text(file: str, text: str) -> Make:
    return lambda folder: (folder / file).write_text(text, encoding="utf-8")


def _schema(columns: str, label: str = "y", more: str = PARTS, dense: str = "x") -> Make:
    text = f"label: {label}\ndense: [{{name: {dense}}}]\ncategorical: [{columns}]\n{more}"
    return _text("schema.yaml", text)


def _all(*makes: Make) -> Make:
    def make(folder: Path) -> None:
        for one in makes:
            one(folder)

    return make


def _shop(number: int) -> int:
    return number * 7 % 23


def _shops(file: str, seed: int = 0, **columns: Callable[[int], Any]) -> Make:
    return _csv(_rows(seed, shop=_shop, **columns), file)


def _compressed(folder: Path) -> None:
    _shops("rows.csv")(folder)
    (folder / "rows.csv.bz2").write_bytes(bz2.compress((folder / "rows.csv").read_bytes()))


def _one_class(folder: Path) -> None:
    _shops("train.csv")(folder)
    _csv([{**row, "y": 0} for row in _rows(1, shop=_shop)], "valid.csv")(folder)
    test = "split: {by: file, test: [valid.csv]}\n"
    _schema("{name: shop, kind: integer}", more=test)(folder)


def _open_quote(folder: Path) -> None:
    rows = _rows(title=lambda number: '"Never Closed' if number == 200 else f"Title {number % 9}")
    _csv(rows, "plays.tsv", "\t")(folder)
    _schema("{name: title}", more=f'{PARTS}delimiter: "\\t"\n')(folder)


def _name(number: int) -> str:
    return f"s{_shop(number)}"


def _time(number: int) -> str:
    at = datetime(2024, 1, 1) + timedelta(hours=6 * number)  # noqa: DTZ001
    return f"{at:%Y-%m-%d %H:%M:%S.%f}+00:00"


def _days(items: Iterable[int]) -> Make:
    makes = [
        _csv(_rows(day, item=lambda number, most=most: number % most), f"day{day}.csv")
        for day, most in enumerate(items, 1)
    ]
    return _all(*makes)


def _folders(folder: Path) -> None:
    for day in range(1, 4):
        _parquet(_rows(day, shop=_shop), f"rows/dt=2024-05-0{day}/part-0.parquet")(folder)
    last = 'split: {by: file, test: ["*dt=2024-05-03*"]}\n'
    _schema("{name: shop, kind: integer}", more=last)(folder)


def _wide(folder: Path) -> None:
    names = [f"c{number}" for number in range(400)]
    rows = [{**row, **dict.fromkeys(names, number)} for number, row in enumerate(_rows()[:50])]
    _parquet(rows, "wide.parquet")(folder)
    _schema(", ".join(f"{{name: {name}, kind: integer}}" for name in names))(folder)


SHOP = "{name: shop, kind: integer}"
NAMED = "{name: shop}"
PREDICT = "predict predict.checkpoint=run predict.output=scores.csv predict.rows"
EXPORT = "export export.checkpoint=run export.output=out export.format=safetensors"
IMPORT = "import import.file=out/model.safetensors import.names=ours import.output=in"
GUESSED = "prepare data=table data.schema=guessed.yaml data.raw"
CASES = (
    Case("bzip2", _compressed, (f"{GUESS}=rows.csv.bz2",), 3, "bzip2"),
    Case(
        "one-class-to-monitor",
        _one_class,
        (
            f"{TRAIN} data.raw=[train.csv,valid.csv] train.monitor=auc train.patience=2 "
            "train.evaluate_every=1",
        ),
        2,
        "(?i)auc",
    ),
    Case(
        "booleans",
        _all(
            _csv(_rows(gold=lambda n: n % 3 == 0), "mail.csv"),
            _schema("{name: gold}"),
        ),
        (f"{PREPARE} data.raw=mail.csv",),
        0,
        "400 rows",
    ),
    Case(
        "dropped-rows",
        _all(_shops("rows.csv"), _schema(SHOP)),
        (f"{TRAIN} data.raw=rows.csv train.steps=null train.epochs=1",),
        0,
        "left out of each epoch",
    ),
    Case(
        "null-lists",
        _all(
            _parquet(_rows(tags=lambda n: ["a", "b"][: n % 3]), "mon.parquet"),
            _parquet(_rows(tags=lambda n: None), "tue.parquet", {"tags": pa.list_(pa.null())}),
            _schema("{name: tags, max_length: 8}"),
        ),
        (f"{TRAIN} data.raw=mon.parquet hydra.run.dir=run", f"{PREDICT}=tue.parquet"),
        0,
        "400 rows",
    ),
    Case(
        "guess-nested",
        _parquet(_rows(shop=_shop, device=lambda n: {"os": str(n % 2)}), "events.parquet"),
        (f"{GUESS}=events.parquet", f"{GUESSED}=events.parquet"),
        0,
        "400 rows",
    ),
    Case(
        "hash-unseen",
        _all(_days((10, 20)), _schema("{name: item, kind: integer, hash_size: 64}", more=ALL)),
        (f"{TRAIN} data.raw=day1.csv hydra.run.dir=run", f"{PREDICT}=day2.csv"),
        0,
        "400 rows",
    ),
    Case("hive-folders", _folders, (f"{PREPARE} data.raw=rows/*/*.parquet",), 0, "1,200 rows"),
    Case("folder-of-rows", _folders, (f"{PREPARE} data.raw=rows",), 0, "1,200 rows"),
    Case(
        "import-renumbered",
        _all(
            _csv(_rows(shop=_name), "one.csv"),
            _csv(_rows(shop=_name)[::-1], "two.csv"),
            _schema(NAMED),
        ),
        (
            f"{PREPARE} data.raw=two.csv data.prepared=two",
            f"{TRAIN} data.raw=one.csv data.prepared=one hydra.run.dir=run",
            EXPORT,
            f"{IMPORT} data=table data.schema=schema.yaml data.prepared=two model=dlrm_small",
        ),
        0,
        "took 17 tensors",  # tests/run/test_whole_runs.py compares scores
    ),
    Case(
        "libsvm",
        _text("rows.libsvm", "1 1:0.2 9:1\n0 1:0.3 8:1\n" * 100),
        (f"{GUESS}=rows.libsvm",),
        3,
        "LibSVM",
    ),
    Case(
        "list-text",
        _csv(_rows(genres=lambda n: f'"{["Action", "Indie"][: n % 3]}"'), "games.csv"),
        (f"{GUESS}=games.csv", f"{GUESSED}=games.csv"),
        0,
        "400 rows",
    ),
    Case(
        "next-day",
        _all(_days((10, 20)), _schema("{name: item, kind: integer}")),
        (
            f"{TRAIN} data.raw=day1.csv hydra.run.dir=run",
            f"{TRAIN} data.raw=day2.csv hydra.run.dir=new checkpoint.resume=run train.steps=4",
        ),
        3,  # tables do not grow yet: refused in words, and yesterday's run is as it was
        "the checkpoint was made from other rows",
    ),
    Case("many-columns", _wide, (f"{PREPARE} data.raw=wide.parquet",), 0, "50 rows"),
    Case(
        "no-header",
        _csv(_rows(shop=_shop), "clicks.csv", header=False),
        (f"{GUESS}=clicks.csv",),
        0,
        "looks like values",
    ),
    Case("open-quote", _open_quote, (f"{PREPARE} data.raw=plays.tsv",), 3, "quote"),
    Case(
        "placeholders",
        _all(
            _csv(_rows(price=lambda n: ("1.5", "NA", "—")[n % 3]), "goods.csv"),
            _schema("{name: x}", dense="price", more=f'{PARTS}missing_values: ["—", NA]\n'),
        ),
        (f"{PREPARE} data.raw=goods.csv",),
        0,
        "400 rows",
    ),
    Case(
        "time-zone",
        _all(
            _csv(_rows(shop=_shop, when=_time), "visits.csv"),
            _schema(SHOP, more="split: {by: time, column: when, test_from: 2024-03-01}\n"),
        ),
        (f"{PREPARE} data.raw=visits.csv",),
        0,
        "400 rows",
    ),
    Case(
        "vocabulary-lost",
        _all(
            _csv(_rows(shop=_name), "one.csv"),
            _csv(_rows(3, shop=_name), "two.csv"),
            _schema(NAMED),
        ),
        (
            f"{TRAIN} data.raw=one.csv hydra.run.dir=run",
            f"{TRAIN} data.raw=two.csv hydra.run.dir=two prepare.overwrite=true",
            f"{PREDICT}=one.csv",
        ),
        0,
        "400 rows",
    ),
    Case(
        "wide-ids",
        _parquet(
            _rows(order_id=lambda n: Decimal(2**63 + n % 40), hash=lambda n: 2**64 - 1 - n % 40),
            "orders.parquet",
            {"order_id": pa.decimal128(20, 0), "hash": pa.uint64()},
        ),
        (f"{GUESS}=orders.parquet", f"{GUESSED}=orders.parquet"),
        0,
        "400 rows",
    ),
)
ATTACKS = tuple(one.attack() for one in CASES)
