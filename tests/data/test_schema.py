"""Schema files: what is in the package, and what is wrong in a file of a person's own."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dlrm_hybrid.data.schema import ByFraction, CategoricalColumn, Schema
from dlrm_hybrid.data.schemas import reading
from dlrm_hybrid.types import ConfigError, DataError

TABLE = """
label: bought
dense:
  - {name: age, transform: standardise, missing: 40}
  - {name: price, transform: log1p}
categorical:
  - {name: città, min_count: 5}
  - {name: tags, max_length: 8, separator: "|"}
  - {name: shop, kind: integer, hash_size: 1000}
ignore: [user]
split: {by: time, column: when, validation_from: 2024-02-01, test_from: "2024-03-01"}
"""


def test_the_package_knows_criteo() -> None:
    for name in ("criteo_kaggle", "criteo_1tb", "criteo_1tb_multi_hot"):
        found = reading.builtin(name)
        assert found.format == "criteo"
        assert [one.name for one in found.dense] == [f"I{i}" for i in range(1, 14)]
        assert {one.transform for one in found.dense} == {"log1p"}
        assert [one.name for one in found.categorical] == [f"C{i}" for i in range(1, 27)]
        assert {one.kind for one in found.categorical} == {"hash8"}
        assert found.multi_hot == ()
    with pytest.raises(DataError, match="'avazu' is not one of: bars_avazu_x1, bars_cri"):
        reading.builtin("avazu")


def test_schemas_are_named_or_files(tmp_path: Path) -> None:
    assert reading.named("bars_avazu_x1") == reading.builtin("bars_avazu_x1")
    found = reading.builtin("bars_criteo_x4")
    assert (found.num_dense, len(found.categorical), found.label) == (0, 39, "Label")
    path = tmp_path / "bars_avazu_x1"
    path.write_text(TABLE, encoding="utf-8")
    assert reading.named(str(path)) == reading.read(path)
    with pytest.raises(ConfigError, match=r"data.schema = 'criteo_1tb': is of data=criteo_1tb"):
        reading.named("criteo_1tb")
    with pytest.raises(ConfigError, match=r"'avazu': no such file; .* bars_avazu_x1, bars_criteo_"):
        reading.named("avazu")


def test_a_table_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(TABLE, encoding="utf-8")
    found = reading.read(path)
    assert found.num_dense == 2
    assert (found.single, found.multi_hot) == ((0, 2), (1,))
    assert found.categorical[0] == CategoricalColumn(name="città", min_count=5)
    assert found.read_columns == ("bought", "age", "price", "città", "tags", "shop", "when")
    assert found.split is not None and found.split.by == "time"
    other = replace(found, categorical=(*found.categorical[:2], CategoricalColumn(name="shop")))
    assert found.differences(found) == []
    assert found.differences(other) == [
        "data.schema.categorical[2].kind: prepared with 'integer', the schema says 'string'",
        "data.schema.categorical[2].hash_size: prepared with 1000, the schema says 0",
    ]


GOOD = "label: y\ndense: []\ncategorical: [{name: c}]\n"
BY_FRACTION = "split: {by: fraction, test: 0.1}\n"
FAULTS = [
    ("[", "m.yaml:1:2: not YAML"),
    ("- 1", "a schema is a mapping"),
    ("label: 1\nlabel: 2", r"m.yaml:1:1: not YAML: 'label' twice"),
    ("label: &x y\nignore: [*x]", "m.yaml:2:10: not YAML: aliases"),
    ("label: y", "m.yaml: dense: missing\nm.yaml: categorical: missing"),
    *(
        (GOOD.replace("c}", f"c, embedding_dim: {dim}}}"), told)
        for dim, told in (
            ("0", r"categorical\[0\].embedding_dim = 0: must be greater than or equal to 1"),
            ("4097", r"categorical\[0\].embedding_dim = 4097: must be less than or equal to 4096"),
            ("wide", r"categorical\[0\].embedding_dim = 'wide': must be a valid integer"),
        )
    ),
    (GOOD, "split: missing; by: fraction, file or time"),
    *(
        (GOOD + BY_FRACTION + f"names: {names}", told)
        for names, told in (
            ("[y, c, c]", r"names\[2\] = 'c': is names\[1\] too"),
            ("[y, c, z]", r"names\[2\] = 'z': no column of the schema; use it or name it in"),
            ("[c]", "names: lacks 'y'"),
        )
    ),
    (GOOD + "split: {test: 0.1}", "split.by: missing"),
    (GOOD + "split: {by: fraction, test: 1.5}", "split.test = 1.5: must be less than 1"),
    (GOOD + "split: {by: fraction, test: 0}", "split.test = 0: some rows must test"),
    (GOOD + "split: {by: fraction, test: 0.5, validation: 0.5}", "no rows are left to train"),
    (GOOD + "split: {by: file, test: []}", "split.test = "),
    (GOOD + "split: {by: time, column: t, test_from: 5, validation_from: 6}", "after test_from ="),
    (GOOD + "split: {by: time, column: t, test_from: a, validation_from: 6}", "not of the type"),
    (GOOD + "labels: y", "labels: unknown key"),
    (GOOD + "delimiter: →", "delimiter = '→': must be a tab, or a character of ASCII"),
    (GOOD + "delimiter: '\"'", "delimiter = '\"': must be a tab, or"),
    (GOOD + 'delimiter: "\\0"', "delimiter = '.x00': must be a tab, or"),
    (GOOD + "quote: single", "quote = 'single': must be 'double' or 'none'"),
    (GOOD.replace("c}", "y}"), r"categorical\[0\].name = 'y': is label too"),
    (GOOD.replace("c}", "c, kind: float}"), r"categorical\[0\].kind = 'float': must be"),
    (GOOD.replace("c}", "c, min_count: -1}"), r"categorical\[0\].min_count = -1: must be greater"),
    (GOOD.replace("c}", "c, separator: ';'}"), r"categorical\[0\].separator: only with max_len"),
    (GOOD.replace("c}", "c, expand_to: 0}"), r"categorical\[0\].expand_to = 0: must be greater"),
    (
        GOOD.replace("c}", "c, expand_to: 2, max_length: 3}"),
        r"categorical\[0\].expand_to: only with max_length = 1",
    ),
    (GOOD.replace("[]", "[{name: d, transform: log}]"), r"dense\[0\].transform = 'log': must be"),
    (GOOD.replace("[]", "[{name: d, missing: .nan}]"), r"dense\[0\].missing"),
    (GOOD + "format: criteo\nsplit: {by: fraction, test: 0.1}", "split: not with format: criteo"),
    (GOOD.replace("c}", "c, bucket: log_squared}"), r"bucket: only with kind: integer, not string"),
    (
        GOOD.replace("c}", "c, kind: integer, bucket: log2}"),
        r"bucket = 'log2': must be 'log_squared'",
    ),
    (
        GOOD.replace("c}", "c, missing: 3}"),
        r"missing = 3: a number needs kind: integer, not string",
    ),
    (
        GOOD.replace("c}", "c, missing: other}"),
        r"missing = 'other': must be 'own' or 'shared', or must be a valid "
        r"integer \(column 'c'\)$",
    ),
    (
        GOOD.replace("c}", "c, kind: integer, missing: -9223372036854775808}"),
        r"missing = -9223372036854775808: must be .own. or .shared., or must be greater",
    ),
    (
        GOOD.replace("c}", "c, max_length: 2, missing: shared}"),
        r"categorical\[0\].missing: only with max_length = 1: lists may be empty",
    ),
    (
        GOOD.replace("c}", "c, missing: shared}") + "format: criteo",
        r"categorical\[0\]: bucket and missing are not read with format: criteo",
    ),
    (
        GOOD + "split: {by: time, column: t, test_from: 5 May}",
        r"split.test_from = '5 May': is not a time as 2024-03-01 12:00:00, .* since 1970",
    ),
    (
        GOOD + "split: {by: time, column: t, test_from: 2024-01-01T00:00:00.1234567Z}",
        r"test_from = '2024-01-01T00:00:00.1234567Z': rows are compared to the microsecond",
    ),
    (  # in the order of its text it is before
        GOOD + "split: {by: time, column: t, validation_from: '2024-01-01T00:00:00-05:00',"
        " test_from: '2024-01-01T03:00:00Z'}",
        "after test_from =",
    ),
    (GOOD.replace("c}", f"c, min_count: 0x{'F' * 4000}}}"), "m.yaml:3:36: .* 0xFFF.* of 400"),
    (GOOD.replace("c}", f"c, min_count: {'9' * 5000}}}"), "m.yaml:3:36: not YAML: 999.* of 5000"),
    (GOOD + f"split: {{by: time, column: t, test_from: {'9' * 400}}}", "not YAML: 999.* is no num"),
    (GOOD + "2024-01-01: 1", "m.yaml: 2024-01-01: unknown key"),
    (GOOD.replace("c}", "c, truncate: last}"), r"\[0\].truncate: only with max_length > 1"),
    (GOOD.replace("c}", "c, pooling: mean}"), r"\[0\].pooling: only with max_length > 1"),
    (GOOD.replace("c}", "c, weights: w}"), r"\[0\].weights: only with max_length > 1"),
    (
        GOOD.replace("c}", "c, max_length: 2, pooling: mean, weights: w}"),
        r"\[0\].weights: only with pooling: sum, not mean",
    ),
    (
        GOOD.replace("c}", "c, max_length: 2, default: '', weights: w}"),
        r"\[0\].default = '': not with weights",
    ),
    (
        GOOD.replace("c}", "c, max_length: 2, weights: c}"),
        r"\[0\].weights = 'c': is categorical\[0\].n",
    ),
    (GOOD.replace("c}", "c, max_length: 2, pooling: max}"), "pooling = 'max': must be 'sum' or"),
    (GOOD.replace("c}", "c, max_length: 2, truncate: end}"), "truncate = 'end': must be 'first', "),
    (GOOD + "missing_values: [NA, '-1']", r"missing_values\[1\] = '-1': is a number, which is nev"),
    (GOOD + "missing_values: [True]", r"missing_values\[0\] = True: must be a valid string"),
    (
        GOOD.replace("c}", "c, kind: integer, default: x}"),
        r"\[0\].default = 'x': 'x' is not an int",
    ),
    (
        GOOD.replace("c}", "c, max_length: 2, default: x}"),
        "default = 'x': a list needs a separator",
    ),
    (GOOD.replace("[]", "[{name: d, default: x}]"), r"dense\[0\].default = 'x': is no number"),
    (GOOD.replace("c}", "c, min-count: 1}"), r"m.yaml: categorical\[0\].min-count: unknown key"),
    *(
        (GOOD.replace("{name: c}", f"{{name: c, table: t}}, {{name: d, table: t, {other}}}"), told)
        for other, told in (
            (
                "kind: hash8",
                r"\[1\].kind = 'hash8': column 'd' has the table 't' with 'c', whose k",
            ),
            (
                "hash_size: 9",
                r"\[1\].hash_size = 9: .* 'c', whose hash_size is 0: must be the same",
            ),
            ("min_count: 9", r"\[1\].min_count = 9: .*, whose min_count is 0: must be the same"),
            ("missing: shared", r"\[1\].missing = 'shared': .*, whose missing is 'own': must be"),
            ("max_rows: 9", r"\[1\].max_rows = 9: .*, whose max_rows is None: must be the same"),
            ("expand_to: 2", r"\[1\].expand_to: not with table"),
            ("embedding_dim: 8", r"\[1\].embedding_dim = 8: .*, whose embedding_dim is None: must"),
        )
    ),
    (
        GOOD.replace("c}", "c, kind: integer, table: t, bucket: log_squared}, {name: d, table: t}"),
        r"\[1\].kind = 'string': (.|\n)*\[1\].bucket = None: column 'd' .*, whose bucket is 'log",
    ),
    (
        GOOD.replace("{name: c}", "{name: c}, {name: d, table: c}"),
        r"\[1\].table = 'c': is a column that does not name it; give column 'c' this table too",
    ),
    (GOOD.replace("c}", "c, min_count: -3}"), r"\[0\].min_count = -3: .* \(column 'c'\)$"),
    (GOOD.replace("[]", "[{name: a}, {name: b, length: 0}]"), r"dense\[1\].*\(column 'b'\)$"),
    (GOOD.replace("c}", "c, table: 3}"), r"categorical\[0\].table = 3: must be a valid string"),
    (GOOD.replace("c}", "c, table: t}") + "format: criteo", r"\[0\].table = 't': not with format"),
    (GOOD + "!!binary aGk=: 1", "m.yaml:4:1: not YAML: !!binary is not for schemas"),
    (GOOD + "ignore: !!set {a}", "m.yaml:4:9: not YAML: !!set is not for schemas"),
    (GOOD + "5: 1", "m.yaml:1:1: not YAML: the key 5 must be text: quote it"),
    (GOOD + "null: 1", "m.yaml:1:1: not YAML: the key None must be text: quote it"),
    ("label: !!python/object/apply:os.system [id]", "not YAML: could not determine a constructor"),
    *(
        (GOOD.replace("label: y", f"label: {label}"), told)
        for label, told in (
            ("[a]", "label: a list has two labels or more; one is written without brackets"),
            ("[]", "label: a list has two labels or more"),
            ("[a, a]", r"label\[1\].name = 'a': is that of label\[0\] too"),
            (
                "[{column: a, above: 3}, {column: a, above: 4}]",
                r"label\[1\].name = 'a': is that of label\[0\] too",
            ),
            ("[a, c]", r"categorical\[0\].name = 'c': is label too"),
            ("[a, {column: b, above: 3, positive: [3]}]", r"label\[1\]: 'b' needs either `posi"),
            ("[a, 3]", r"label\[1\] = 3: must be "),
            ("[a, [b]]", r"label\[1\] = \['b'\]: must be "),
            ("[a, {column: b, upon: 3}]", r"label\[1\].upon: unknown key$"),
            ("[a, {above: 3}]", r"label\[1\].column: missing$"),
            ("[a, {column: b, loss_weight: 0}]", r"label\[1\].loss_weight = 0: must be gr"),
            ("[a, {column: b, loss_weight: .inf}]", r"label\[1\].loss_weight = .*finite"),
            ("[a, {column: b, loss_weight: much}]", r"label\[1\].loss_weight = 'much': must"),
            ("{column: a, above: 3, loss_weight: 2}", "label.loss_weight = 2.0: only of one in a"),
            ("{column: a, above: 3, name: b}", "label.name = 'b': only of one in a list"),
            ("{column: y}", "label: 'y' needs either `positive` or `above`"),
            ("{column: y, positive: [a], above: 1}", "label: 'y' needs either `positive` or"),
            ("{column: c, above: 1}", r"categorical\[0\].name = 'c': is label too"),
            ("{column: y, positive: []}", r"label.positive = \[\]: .* at least 1 item"),
            ("{column: y, positive: [yes]}", r"label.positive\[0\] = True: must be a valid str"),
            ("{column: y, above: .nan}", "label.above = nan: must be a finite number"),
            ("{column: y, upon: 1}", "m.yaml: label.upon: unknown key$"),
            ("{above: 1}", "m.yaml: label.column: missing$"),
            ("3", "label = 3: must be "),
            ("{column: y, above: 1}\nformat: criteo", "label: not with format: criteo"),
            ("[a, b]\nformat: criteo", "label: not with format: criteo"),
            ("a\nweight: a", "weight = 'a': is label too"),
            ("a\nweight: c", r"categorical\[0\].name = 'c': is weight too"),
            ("a\nweight: b\nignore: [b]", r"ignore\[0\] = 'b': is weight too"),
            ("a\nweight: 3", "weight = 3: must be a valid string"),
            ("a\nweight: b\nformat: criteo", "weight: not with format: criteo"),
            ("a\ngroup: c\nformat: criteo", "group: not with format: criteo"),
            ("a\ngroup: [c]", r"group = \['c'\]: must be a valid string"),
        )
    ),
    *(
        (GOOD.replace("[]", f"[{{name: d, {keys}}}, {{name: 'd[2]'}}]") + BY_FRACTION, told)
        for keys, told in (
            ("length: 3, default: 3", r"dense\[0\].default = 3: of lists only a missing one, ''"),
            ("separator: x", r"dense\[0\].separator: only with len"),
            ("length: 3", r"dense = 'd\[2\]': is dense"),
            ("length: 0", r"dense\[0\].length = 0: must be greater"),
        )
    ),
]


@pytest.mark.parametrize(("text", "told"), FAULTS)
def test_faults_are_told_with_file_key_and_value(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        reading.loads(text, "m.yaml")
    assert all(line.startswith("m.yaml:") for line in str(caught.value).splitlines())


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"xxx: cannot be read: File name too long \(data.schema"):
        reading.named(300 * "x")
    with pytest.raises(ConfigError, match="data.schema = 'mine': no such file; the package has"):
        reading.named("mine")
    with pytest.raises(ConfigError, match="nothing.yaml': no such file; the package has"):
        reading.read(tmp_path / "nothing.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"label: \xe9")
    with pytest.raises(ConfigError, match="latin.yaml: cannot be read: not UTF-8"):
        reading.read(tmp_path / "latin.yaml")


names = st.text(min_size=1, max_size=8)
columns = (
    st.builds(
        CategoricalColumn,
        name=names,
        kind=st.sampled_from(["string", "integer", "hash8"]),
        min_count=st.integers(0, 9),
        hash_size=st.integers(0, 2**31 - 2),
        max_length=st.integers(1, 9),
    )
    | st.builds(
        CategoricalColumn,
        name=names,
        max_length=st.integers(2, 9),
        pooling=st.sampled_from(["sum", "mean"]),
    )
    | st.builds(
        CategoricalColumn,
        name=names,
        kind=st.just("integer"),
        bucket=st.sampled_from([None, "log_squared"]),
        missing=st.sampled_from(["own", "shared"]) | st.integers(1 - 2**63, 2**63 - 1),
    )
)


@given(st.lists(columns, min_size=1, max_size=4, unique_by=lambda one: one.name), names)
def test_what_yaml_says_is_what_was_meant(made: list[CategoricalColumn], label: str) -> None:
    meant = Schema(
        label=label,
        dense=(),
        categorical=tuple(made),
        split=ByFraction(by="fraction", test=0.25, seed=3),
    )
    values = json.loads(json.dumps(asdict(meant)))
    # PyYAML writes a NEL as it is, and reads it as the end of a line.
    text = yaml.safe_dump(values, allow_unicode="\\x85" not in repr(meant))
    if label in {one.name for one in made}:
        with pytest.raises(ConfigError, match="is label too"):
            reading.loads(text, "m.yaml")
    else:
        assert reading.loads(text, "m.yaml") == meant


@given(st.text(max_size=60) | st.text("labeldnsctgoric:{}[]-, \n&*!%1.\"'", max_size=60))
def test_any_text_is_a_schema_or_told_why_not(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^m\.yaml"):
        reading.loads(text, "m.yaml")
