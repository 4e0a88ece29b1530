"""Distinct ids of a batch by the server that owns their rows, and the sections that hold them.

    LOOKUP:  rows of the batch, lookups │ ids
    ROWS:                                     │ rows of the ids
    UPDATE:  rows of the batch, lookups │ ids │ sums of their gradients

Ids travel as their number per table and Golomb-Rice codes of their gaps, numbered as the server
numbers its rows. Rows and gradients are in the order of the ids.

Shapes: B rows of a batch, F tables, D width of the widest (see `Widths`), K distinct ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from dlrm_hybrid.arrays import Int64s
from dlrm_hybrid.bags import Bags
from dlrm_hybrid.compress.embedding.ends import Held, Message, Read
from dlrm_hybrid.compress.embedding.memory import Rows
from dlrm_hybrid.compress.embedding.widths import Widths
from dlrm_hybrid.model.embeddings import DistinctIds, distinct_ids
from dlrm_hybrid.model.exchange.distinct import decoded_ids, encoded_ids
from dlrm_hybrid.parallel.finite import LOOKUPS_PREFIX
from dlrm_hybrid.types import DataError, DlrmError
from dlrm_hybrid.wire.dense import array_of, dense
from dlrm_hybrid.wire.section import ELEMENT_BYTES, Dtype, Encoding, Section

_TABLE_SHIFT = 32  # tables have fewer than 2**31 rows
_ID_MASK = (1 << _TABLE_SHIFT) - 1


class AskedIds(NamedTuple):
    """The ids of a batch in one message to one server.

    Attributes:
        ids: the distinct ids.
        most: largest number of ids in any one table of the batch, with repeats; or more.
        lookups: number of ids of the batch that the server owns, with repeats; or more.
    """

    ids: Rows
    most: int
    lookups: int


@final
@dataclass(frozen=True, slots=True, eq=False)
class SplitIds:
    """Distinct ids, split by server.

    Attributes:
        asked: ids per server.
        where: per server, positions of its ids among all; None if one server owns all.
    """

    asked: Sequence[AskedIds]
    where: Sequence[Tensor] | None

    def part(self, values_KD: Tensor, server: int) -> Tensor:
        """Select, from values for all ids, those for the ids of one server."""
        return values_KD if self.where is None else values_KD[self.where[server]]

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Join the values for the ids of each server to (K, D) for all ids."""
        if self.where is None:
            return parts[0]
        values_KD = parts[0].new_empty(sum(map(len, parts)), parts[0].shape[1])
        for where_K, part in zip(self.where, parts, strict=True):
            values_KD[where_K] = part
        return values_KD


def split_ids(ids: Rows, most: int, lookups_S: Int64s) -> SplitIds:
    """Split distinct ids by the server that owns them.

    Args:
        ids: ids as trainers number rows; server s of S owns the ids s, s + S, ….
        most: see `AskedIds`.
        lookups_S: number per server; see `AskedIds`.
    """
    servers = len(lookups_S)
    if servers == 1:
        return SplitIds([AskedIds(ids, most, int(lookups_S[0]))], None)
    owner_K = ids.ids_K % servers
    table_K = np.repeat(np.arange(len(ids.counts_L)), ids.counts_L)
    where = [np.flatnonzero(owner_K == server) for server in range(servers)]
    asked = [
        AskedIds(
            Rows(
                ids.ids_K[at_K] // servers, np.bincount(table_K[at_K], minlength=len(ids.counts_L))
            ),
            most,
            int(count),
        )
        for at_K, count in zip(where, lookups_S, strict=True)
    ]
    return SplitIds(asked, [torch.from_numpy(at_K) for at_K in where])


def split_batch(bags: Bags[Tensor], servers: int) -> tuple[DistinctIds, SplitIds]:
    """Find the distinct ids of a batch, and split them by server.

    Args:
        bags: its ids.
        servers: S.
    """
    ids = distinct_ids(bags, np.arange(bags.tables))
    owned = Rows(ids.ids_K, ids.counts_F)
    return ids, split_ids(owned, ids.most, lookups_of(ids, servers))


def lookups_of(ids: DistinctIds, servers: int) -> Int64s:
    """Number of ids of a batch that each server owns, with repeats."""
    if servers == 1:
        return np.array([ids.inverse.numel()], np.int64)
    owner_K = ids.ids_K % servers
    return np.bincount(owner_K[ids.inverse.numpy().reshape(-1)], minlength=servers)


def id_sections(asked: AskedIds, rows_F: Int64s) -> tuple[Section, Section]:
    """Encode ids for a server that owns `rows_F` rows of the tables."""
    sizes = np.array([asked.most, asked.lookups], np.int64)
    coded = encoded_ids(asked.ids.ids_K, asked.ids.counts_L, rows_F, asked.most)
    return dense(0, sizes), dense(1, coded)


def asked_of(sections: Sequence[Section], rows_F: Int64s, what: str) -> AskedIds:
    """Decode the ids of `id_sections`.

    Raises:
        DlrmError: the sections hold no ids of these tables; the message begins with `what`.
    """
    expected = [(Encoding.DENSE, Dtype.INT64), (Encoding.DENSE, Dtype.UINT8)]
    if [(x.encoding, x.dtype) for x in sections] != expected or sections[0].count != 2:
        raise DlrmError(f"{what}: {len(sections)} sections that are no ids")
    most, lookups = (int(number) for number in array_of(sections[0]))
    counts_F = np.empty(len(rows_F), np.int64)
    ids_K = decoded_ids(array_of(sections[1]).copy(), counts_F, rows_F, most)
    if ids_K is None or not len(ids_K) <= lookups <= most * len(rows_F):
        raise DlrmError(f"{what}: not the ids of {lookups} lookups, {most} of any table")
    return AskedIds(Rows(ids_K, counts_F), most, lookups)


def number_section(message: bytes, dtype: Dtype) -> Section:
    """The section that holds a message with rows, or with gradients."""
    return Section(2, Encoding.DENSE, dtype, len(message) // ELEMENT_BYTES[dtype], message)


def message_of(section: Section, dtype: Dtype) -> Message:
    """The message in a `number_section`; raises SectionError if it holds another type."""
    if (section.encoding, section.dtype) != (Encoding.DENSE, dtype):
        raise section.error(f"it holds {section.dtype.name.lower()}, expected {dtype.name.lower()}")
    return section.payload


def keys_of(rows: Rows) -> Int64s:
    """Keys of rows: one increasing number per row, from table and id."""
    return rows.ids_K + np.repeat(np.arange(len(rows.counts_L)) << _TABLE_SHIFT, rows.counts_L)


def first_no_row(keys_N: Int64s, rows_F: Int64s) -> int | None:
    """Index of the first number that is no key of such tables or does not increase, or None."""
    tables_N = keys_N >> _TABLE_SHIFT
    is_table_N = (tables_N >= 0) & (tables_N < len(rows_F))
    is_row_N = (keys_N & _ID_MASK) < rows_F[np.where(is_table_N, tables_N, 0)]
    increases_N = np.append(True, keys_N[1:] > keys_N[:-1])[: len(keys_N)]
    wrong = np.flatnonzero(~(is_table_N & is_row_N & increases_N))
    return int(wrong[0]) if len(wrong) else None


def ids_of(keys_K: Int64s, tables: int) -> Rows:
    """The ids of some increasing keys."""
    counts_F = np.bincount(keys_K >> _TABLE_SHIFT, minlength=tables)
    return Rows(keys_K & _ID_MASK, counts_F)


def held_by(server: int, rows_F: Sequence[int], widths: Widths) -> Held:
    """The rows that a table server owns; its state of a table is numbered after other servers'."""
    first = server * len(rows_F)
    return Held(tuple(range(first, first + len(rows_F))), tuple(rows_F), widths)


def ahead_of(trainer: int, server: int) -> str:
    """Begin of the names of rows that a trainer has asked a table server for ahead of updates."""
    return f"{LOOKUPS_PREFIX}{trainer}.ahead.{server}."


def flight_tensors(rows: Rows, read: Read) -> dict[str, Tensor]:
    """Rows that a trainer has read, but not taken, for a checkpoint."""
    numbers_KD = torch.from_numpy(read[0])
    exponent = numbers_KD.new_tensor([read[1]])  # has the type where there are no rows
    return {"keys": torch.from_numpy(keys_of(rows)), "numbers": numbers_KD, "exponent": exponent}


def flights_of(values: Mapping[str, Tensor], head: str, held: Held) -> list[tuple[Rows, Read]]:
    """Rows of a server that `flight_tensors` has, batch by batch.

    Args:
        values: tensors of a checkpoint; empty ones are not among them.
        head: begin of their names, see `ahead_of`.

    Raises:
        DataError: they are no rows of the server.
    """
    flights: list[tuple[Rows, Read]] = []
    while (exponent := values.get(f"{head}{len(flights)}.exponent")) is not None:
        name = f"{head}{len(flights)}."
        keys = values.get(f"{name}keys", torch.empty(0, dtype=torch.int64))
        numbers = values.get(f"{name}numbers", exponent.new_empty(0, held.widths.widest))
        expected = (torch.int64, 1, (len(keys), held.widths.widest))
        is_fit = (keys.dtype, keys.dim(), numbers.shape) == expected
        if not is_fit or first_no_row(keys.numpy(), np.array(held.rows_L, np.int64)) is not None:
            raise DataError(
                f"{name}keys: {list(keys.shape)} with {list(numbers.shape)} numbers are no rows of "
                f"tables of {held.rows_L}"
            )
        read = numbers.to(exponent.dtype).numpy(), int(exponent[0])
        flights.append((ids_of(keys.numpy(), len(held.tables)), read))
    return flights
