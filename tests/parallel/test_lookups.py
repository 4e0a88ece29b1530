"""What is asked of table servers survives the way there; other bytes are refused, never a crash."""

import numpy as np
from bag_draws import counted, drawn_bags
from hypothesis import given
from hypothesis import strategies as st

from dlrm_hybrid.bags import Bags
from dlrm_hybrid.model.embeddings import tensor_bags
from dlrm_hybrid.model.table_rows import owned_rows
from dlrm_hybrid.parallel.tables.lookups import asked_of, id_sections, split_batch
from dlrm_hybrid.types import DlrmError
from dlrm_hybrid.wire.frame import Frame, Kind, decode, encode
from dlrm_hybrid.wire.section import Section

TABLE_ROWS = (3, 50, 1, 2**31 - 1, 9)
SEEDS = st.integers(0, 2**32 - 1)
COUNTS = st.integers(1, 3)  # of servers


def arrived(sections: tuple[Section, ...]) -> tuple[Section, ...]:
    frame = Frame(kind=Kind.LOOKUP, sender=0, attempt=0, number=0, sections=sections)
    return decode(bytes(encode(frame))).sections


def rows_of(server: int, servers: int) -> np.ndarray:
    return np.array(owned_rows(TABLE_ROWS, server, servers), np.int64)


@given(SEEDS, COUNTS, st.integers(0, 20))
def test_what_is_asked_arrives(seed: int, servers: int, rows: int) -> None:
    bags = tensor_bags(drawn_bags(seed, TABLE_ROWS, rows))
    ids, split = split_batch(bags, servers)
    assert sum(asked.lookups for asked in split.asked) == bags.num_ids
    for server, asked in enumerate(split.asked):
        owned_F = rows_of(server, servers)
        found = asked_of(arrived(id_sections(asked, owned_F)), owned_F, "lookup")
        assert np.array_equal(found.ids.ids_K, asked.ids.ids_K)
        assert np.array_equal(found.ids.counts_L, asked.ids.counts_L)
        assert (found.most, found.lookups) == (asked.most, asked.lookups)
        assert len(found.ids.ids_K) <= found.lookups
    assert sum(len(asked.ids.ids_K) for asked in split.asked) == len(ids.ids_K)


@given(SEEDS, COUNTS, st.integers(0, 20))
def test_bags_of_one_id_ask_with_the_bytes_of_ids(seed: int, servers: int, rows: int) -> None:
    rng = np.random.default_rng(seed)
    ids_FB = tensor_bags(Bags(np.stack([rng.integers(0, one, rows) for one in TABLE_ROWS]))).values
    _, one = split_batch(Bags(ids_FB), servers)
    _, other = split_batch(counted(ids_FB), servers)
    for server, (asked, also) in enumerate(zip(one.asked, other.asked, strict=True)):
        owned_F = rows_of(server, servers)
        pairs = zip(id_sections(asked, owned_F), id_sections(also, owned_F), strict=True)
        assert all(bytes(a.payload) == bytes(b.payload) for a, b in pairs)


@given(SEEDS, st.integers(0, 1), st.integers(0, 2**16), st.integers(1, 255))
def test_other_bytes_are_refused_or_other_ids(seed: int, which: int, at: int, flip: int) -> None:
    bags = tensor_bags(drawn_bags(seed, TABLE_ROWS, 9))
    owned_F = rows_of(0, 1)
    (asked,) = split_batch(bags, 1)[1].asked
    sections = list(arrived(id_sections(asked, owned_F)))
    payload = bytearray(sections[which].payload)
    payload[at % len(payload)] ^= flip
    sections[which] = sections[which]._replace(payload=bytes(payload))
    try:
        found = asked_of(sections, owned_F, "lookup")
    except DlrmError as error:
        assert str(error).startswith("lookup")
        return
    assert len(found.ids.ids_K) <= found.lookups <= found.most * len(TABLE_ROWS)
    assert found.ids.counts_L.sum() == len(found.ids.ids_K)
    for ids_K, limit in zip(
        np.split(found.ids.ids_K, np.cumsum(found.ids.counts_L)[:-1]), TABLE_ROWS, strict=True
    ):
        assert (np.diff(ids_K) > 0).all() and (ids_K >= 0).all() and (ids_K < limit).all()
