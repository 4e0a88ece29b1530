"""Kernels on fixed data: a row per kernel, and a digest of all that it writes.

As a program it writes the digests; `test_portable.py` runs it for a processor without extensions.
"""

import json
import sys
from collections.abc import Callable

import numpy as np
import xxhash
from numba.core import config
from numpy.typing import NDArray

from dlrm_hybrid.kernels.distinct import collapse, lay_out, sum_rows
from dlrm_hybrid.kernels.histogram import magnitude_of_rank
from dlrm_hybrid.kernels.id_sets import decode as decode_ids
from dlrm_hybrid.kernels.id_sets import encode as encode_ids
from dlrm_hybrid.kernels.largest import list_largest
from dlrm_hybrid.kernels.levels import read_levels, write_levels
from dlrm_hybrid.kernels.mean import mean_of_all
from dlrm_hybrid.kernels.moments import (
    count_reaching,
    gather_reaching,
    largest_magnitude,
    log_sum,
    magnitude_sums,
    sums,
)
from dlrm_hybrid.kernels.narrow import (
    bfloat16_bits,
    float16_bits,
    from_float16_bits,
    narrow_bfloat16,
    narrow_float16,
)
from dlrm_hybrid.kernels.read_sections import decode, read_sections
from dlrm_hybrid.kernels.rows import decode_rows, decode_rows_of_halves, encode_rows, gather
from dlrm_hybrid.kernels.sample import sample
from dlrm_hybrid.kernels.scatter import (
    approach,
    collect,
    give_back,
    part,
    put,
    put_all,
    scatter_add,
    take,
)
from dlrm_hybrid.kernels.section_forms import choose_forms, fit
from dlrm_hybrid.kernels.select import accumulate_select, select, select_all
from dlrm_hybrid.kernels.sent import clear_sent, keep_first_ties
from dlrm_hybrid.kernels.ternary import (
    measure,
    read_bits,
    read_trits,
    ternarise_bits,
    ternarise_trits,
)
from dlrm_hybrid.kernels.write_sections import STORE_BYTES, encode, write_sections

Outputs = list[NDArray[np.generic]]


def floats(count: int, seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).laplace(size=count).astype(np.float32)


def selected() -> Outputs:
    outputs: Outputs = []
    for count in (0, 1, 63, 64, 1000, 4096):
        residual_N, indices_K = floats(count, 1), np.zeros(count, np.int32)
        values_K = np.zeros(count, np.float32)
        left = [
            accumulate_select(floats(count, 2), residual_N, 2.0, indices_K, values_K),
            select(residual_N, 0.5, indices_K, values_K),
        ]
        outputs += [np.array(left), residual_N, indices_K, values_K]
    gradient_N, residual_N, firsts_E = floats(300, 1), floats(1300, 2), np.array([0, 300, 1300])
    indices_K, values_K = np.zeros(1300, np.int32), np.zeros(1300, np.float32)
    addresses_T = np.array([gradient_N.ctypes.data, 0], np.uint64)
    taus_T, bounds_E = np.array([0.5, 1.5], np.float32), np.zeros(3, np.int64)
    select_all(addresses_T, taus_T, firsts_E, residual_N, bounds_E, indices_K, values_K)
    return [*outputs, residual_N, bounds_E, indices_K, values_K]


def scattered() -> Outputs:
    sum_N, touched_W = np.zeros(200, np.float32), np.zeros(4, np.uint64)
    for seed in (1, 2):
        indices_K = np.flatnonzero(np.abs(floats(200, seed)) > 1).astype(np.int32)
        bounds_E, values_K = np.array([0, indices_K.size]), floats(indices_K.size, seed + 2)
        scatter_add(np.array([0, 200]), bounds_E, indices_K, values_K, sum_N, touched_W)
    union_N = np.zeros(200, np.int32)
    union_K = union_N[: collect(touched_W, union_N)]
    taken_K, out_N = np.empty(union_K.size, np.float32), np.ones(200, np.float32)
    take(sum_N, union_K, taken_K)
    put(union_K, taken_K, out_N)
    firsts_E, bounds_E, local_K = np.array([0, 90, 200]), np.zeros(3, np.int64), union_K.copy()
    part(firsts_E, union_K, bounds_E, local_K)
    addresses_T = np.array([out_N.ctypes.data, out_N[90:].ctypes.data], np.uint64)
    put_all(addresses_T, np.array([90, 110]), bounds_E, local_K, taken_K, True)
    rest_N = np.zeros(200, np.float32)
    outputs: Outputs = [sum_N, touched_W, union_K.copy(), taken_K, out_N]
    bounds_E, rounded_K = np.array([0, union_K.size]), np.rint(taken_K)
    give_back(np.array([0, 200]), bounds_E, union_K, taken_K, rounded_K, rest_N, False)
    told_K = np.empty_like(taken_K)
    approach(union_K, taken_K, rest_N, told_K)
    return [*outputs, bounds_E, union_K, rounded_K, rest_N, told_K]


def put_back() -> Outputs:
    firsts_E, bounds_E = np.array([0, 10, 30]), np.array([0, 4, 9])
    indices_K = np.array([1, 3, 5, 9, 0, 2, 6, 7, 19], np.int32)
    values_K = np.array([2, -1, 1, 3, 1, -1, 5, 1, 4], np.float32)
    residual_N, marks_N = np.zeros(30, np.float32), np.ones(30, np.float32)
    taus_T = np.ones(2, np.float32)
    keep_first_ties(
        *(np.array([0, 2]), np.array([6]), taus_T, firsts_E),
        *(bounds_E, indices_K, values_K, residual_N),
    )
    clear_sent(firsts_E, bounds_E, indices_K, marks_N)
    return [bounds_E, indices_K, values_K, residual_N, marks_N]


def averaged() -> Outputs:
    outputs: Outputs = []
    for trainers in (1, 2, 3):
        given = [floats(5000, seed) for seed in range(trainers)]
        addresses_XT = np.array([[one.ctypes.data] for one in given], np.uint64)
        mean_N = np.zeros(5000, np.float32)
        finite = mean_of_all(addresses_XT, np.array([0, 5000]), mean_N)
        outputs += [np.array(finite), mean_N]
    return outputs


def ranked() -> Outputs:
    cases = [(1, 1), (100, 7), (20_000, 20_000), (20_000, 150)]
    return [np.array([magnitude_of_rank(floats(count, 3), rank) for count, rank in cases])]


def largest() -> Outputs:
    outputs: Outputs = []
    for count, tau in ((63, 1.5), (1000, 2.0)):
        values_N, indices_K = np.rint(2 * floats(count, 6)) / 2, np.zeros(count, np.int32)
        listed = list_largest(
            values_N, tau, np.count_nonzero(np.abs(values_N) > tau) + 1, indices_K
        )
        outputs += [np.array(listed), indices_K[:listed].copy()]
    return outputs


def estimated() -> Outputs:
    values_N, out_N, out_S = floats(5000, 3), np.zeros(5000, np.float32), np.zeros(70, np.float32)
    found = [*sums(values_N), *magnitude_sums(values_N, 0.25), log_sum(values_N)]
    found.append(largest_magnitude(values_N))
    counts = [count_reaching(values_N, 1.0), gather_reaching(values_N, 2.0, out_N)]
    sample(values_N, 11, out_S)
    return [np.array(found), np.array(counts), out_N, out_S]


def ternary() -> Outputs:
    outputs: Outputs = [np.array(measure(floats(1001, 10)))]
    for count in (3, 4097, 21_000):
        values_N, back_N = floats(count, 11), np.zeros(count, np.float32)
        bits, trits = np.zeros(-(-count // 4), np.uint8), np.zeros(-(-count // 5), np.uint8)
        ternarise_bits(values_N, 1.5, 2.0, 2**61 + 5, bits)
        ternarise_trits(values_N, 1.5, 2.0, 2**61 + 5, trits)
        assert read_bits(bits, 0.75, back_N)
        outputs += [bits, trits, back_N.copy()]
        assert read_trits(trits, 0.75, back_N)
        fields = np.zeros(count * 3 // 8 + 9, np.uint8)
        assert write_levels(back_N, 0.75, 1, 3, fields)
        assert read_levels(fields, 0.75, 1, 3, back_N)
        outputs += [fields, back_N]
    return outputs


def kept_of_rows() -> Outputs:
    outputs: Outputs = []
    for width, keep in ((1, 1), (63, 5), (256, 64), (300, 300)):
        x_BN = np.maximum(floats(5 * width, 4), -0.5).reshape(5, width)
        indices_K, values_K = np.zeros(x_BN.size, np.int32), np.zeros(x_BN.size, np.float32)
        tau_B, out_N = np.zeros(5, np.float32), np.ones(x_BN.size, np.float32)
        kept = encode_rows(x_BN.ctypes.data, 5, width, keep, indices_K, values_K, tau_B)
        indices_K, values_K = indices_K[:kept], values_K[:kept]
        decode_rows(indices_K, values_K, out_N.ctypes.data, out_N.size)
        gathered_K = np.empty(kept, np.float32)
        gather(x_BN.ctypes.data, x_BN.size, indices_K, gathered_K)
        halves, wide_N = values_K.view(np.uint8)[: 2 * kept], np.ones(x_BN.size, np.float32)
        decode_rows_of_halves(indices_K, halves, wide_N.ctypes.data, wide_N.size)
        outputs += [indices_K, values_K, tau_B, out_N, gathered_K, wide_N]
    return outputs


def narrowed() -> Outputs:
    words_K = np.random.default_rng(4).integers(0, 2**32, 5000, dtype=np.uint32)
    values_K = words_K.view(np.float32)
    upper_K, halves_K = np.empty_like(words_K), np.empty(words_K.size, np.uint16)
    narrow_bfloat16(words_K, upper_K)
    bfloat16_K = np.empty_like(halves_K)
    bfloat16_bits(words_K, bfloat16_K)
    wide_K = np.empty_like(words_K)
    narrow_float16(words_K, values_K, wide_K, wide_K.view(np.float32))
    float16_bits(wide_K, wide_K.view(np.float32), halves_K)
    back_K = np.empty_like(words_K)
    from_float16_bits(halves_K, back_K, back_K.view(np.float32))
    return [upper_K, bfloat16_K, wide_K, halves_K, back_K]


def coded() -> Outputs:
    indices_K = np.flatnonzero(floats(4000, 5) > 2).astype(np.int32)
    back_K = np.empty_like(indices_K)
    parameter, bits = fit(indices_K)
    gaps = np.zeros(bits // 8 + 1 + STORE_BYTES, np.uint8)
    encode(indices_K, parameter, gaps)
    told = [parameter, bits, decode(gaps, 0, parameter, 4000, back_K)]
    return [np.array(told), gaps, back_K, *sections(0, 4), *sections(200, 4), *sections(0, 2)]


def sections(width: int, value_bytes: int) -> Outputs:
    counts_T, bounds_E, parts = np.array([200, 40, 2000, 5000]), [0], []
    for count, chance in zip(counts_T.tolist(), (1.0, 0.5, 0.01, 0.1), strict=True):
        parts.append(np.flatnonzero(np.random.default_rng(8).random(count) < chance))
        bounds_E.append(bounds_E[-1] + parts[-1].size)
    indices_K = np.concatenate(parts).astype(np.int32)
    values = floats(indices_K.size, 9).view(np.uint8)
    forms_T3, bounds_E = np.zeros((4, 3), np.int64), np.array(bounds_E)
    choose_forms(counts_T, bounds_E, width, width == 0, value_bytes, indices_K, forms_T3)
    sizes_T = forms_T3[:, 1] + value_bytes * np.diff(bounds_E)
    out = np.zeros(sizes_T.sum() + STORE_BYTES, np.uint8)
    write_sections(counts_T, bounds_E, width, indices_K, values, value_bytes, forms_T3, out)
    data, back_E, back_K = out[: sizes_T.sum()], np.zeros_like(bounds_E), np.zeros_like(indices_K)
    data.flags.writeable = False
    back, heads_T3 = np.zeros_like(values), np.stack([forms_T3[:, 0], counts_T, sizes_T], axis=1)
    told = read_sections(data, heads_T3, width, value_bytes, 4, back_E, back_K, back)
    return [np.array(told), forms_T3, data, back_E, back_K, back]


def distinct() -> Outputs:
    rows_L, bits_L = np.array([3, 500, 10_000]), np.array([2, 8, 8])
    ids_FB = np.random.default_rng(6).integers(0, rows_L[:, None], (3, 128))
    keys_FB = np.sort(ids_FB << 8 | np.arange(128), axis=1)
    ids_K, counts_L = np.zeros(ids_FB.size, np.int64), np.zeros(3, np.int64)
    places_BF, sum_KD = np.zeros((128, 3), np.int64), np.zeros((ids_FB.size, 4), np.float32)
    ids_K = ids_K[: collapse(keys_FB, 8, np.arange(3), ids_K, counts_L, places_BF)]
    sum_rows(floats(128 * 3 * 4, 7).reshape(128, 3, 4), places_BF, sum_KD)
    message = np.zeros(2000, np.uint8)
    written = encode_ids(ids_K, counts_L, rows_L, bits_L, message)
    back_K, back_L = np.zeros(ids_FB.size, np.int64), np.zeros(3, np.int64)
    told = [written, decode_ids(message[:written], rows_L, bits_L, back_K, back_L)]
    offsets, bags_K = np.zeros(3 * 128 + 1, np.int64), np.zeros(ids_K.size, np.int64)
    lay_out(ids_K, counts_L[np.newaxis], back_K, offsets, bags_K)
    return [np.array(told), ids_K, counts_L, places_BF, sum_KD, message, back_K, offsets, bags_K]


ROWS: dict[str, Callable[[], Outputs]] = {
    "select": selected,
    "scatter": scattered,
    "mean": averaged,
    "histogram": ranked,
    "sent": put_back,
    "largest": largest,
    "ternary": ternary,
    "estimates": estimated,
    "narrow": narrowed,
    "indices": coded,
    "rows": kept_of_rows,
    "distinct": distinct,
}


def digests() -> dict[str, str]:
    return {
        name: xxhash.xxh3_64_hexdigest(b"".join(one.tobytes() for one in row()))
        for name, row in ROWS.items()
    }


if __name__ == "__main__":
    json.dump({"processor": config.CPU_NAME, **digests()}, sys.stdout)
