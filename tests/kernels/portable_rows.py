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

from dlrm_hybrid.kernels.gaps import (
    STORE_BYTES,
    bag_offsets,
    decode_gaps,
    decode_ids,
    encode_gaps,
    encode_ids,
    fit_parameter,
    merge_rows,
    part_rows,
    sum_rows,
    unique_ids,
)
from dlrm_hybrid.kernels.levels.rounding import round_to_levels
from dlrm_hybrid.kernels.levels.steps import quantise, restore
from dlrm_hybrid.kernels.magnitudes import compact, kth_magnitude, topk_rows
from dlrm_hybrid.kernels.residual import accumulate_select, return_rounding_error
from dlrm_hybrid.kernels.rows import (
    AdamRates,
    Gradients,
    bag_keys,
    sort_by_row,
    update_adagrad,
    update_adam,
    update_sgd,
)
from dlrm_hybrid.kernels.scatter import (
    collect,
    mean_of_all,
    publish,
    put,
    put_all,
    round_bfloat16,
    scatter_add,
)
from dlrm_hybrid.kernels.sections import Format, read_sections, write_sections
from dlrm_hybrid.kernels.ternary import read_bits, read_levels, ternarise, write_levels
from dlrm_hybrid.wire.gradient_levels import UpdateReceiver, UpdateSender
from dlrm_hybrid.wire.section import Dtype
from dlrm_hybrid.wire.sparse import Elements

BFLOAT16 = Dtype.BFLOAT16
Outputs = list[NDArray[np.generic]]


def floats(count: int, seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).laplace(size=count).astype(np.float32)


def selected() -> Outputs:
    gradient_N, residual_N, offsets_E = floats(300, 1), floats(1300, 2), np.array([0, 300, 1300])
    local_K, values_K = np.zeros(1300, np.int32), np.zeros(1300, np.float32)
    addresses_T = np.array([gradient_N.ctypes.data, 0], np.uint64)
    taus_T, splits_E = np.array([0.5, 1.5], np.float32), np.zeros(3, np.int64)
    accumulate_select(addresses_T, taus_T, offsets_E, residual_N, splits_E, local_K, values_K)
    return [residual_N, splits_E, local_K, values_K]


def scattered() -> Outputs:
    sum_N, touched_W = np.zeros(200, np.float32), np.zeros(4, np.uint64)
    for seed in (1, 2):
        indices_K = np.flatnonzero(np.abs(floats(200, seed)) > 1).astype(np.int32)
        splits_E, values_K = np.array([0, indices_K.size]), floats(indices_K.size, seed + 2)
        scatter_add(np.array([0, 200]), splits_E, indices_K, values_K, sum_N, touched_W)
    union_N = np.zeros(200, np.int32)
    taken_N, out_N = np.zeros(200, np.float32), np.ones(200, np.float32)
    count, _ = collect(touched_W, sum_N, 1, union_N, taken_N)
    union_K, taken_K = union_N[:count], taken_N[:count].copy()
    put(union_K, taken_K, out_N)
    splits_E = np.searchsorted(union_K, [0, 90, 200])
    local_K = union_K - np.repeat(np.array([0, 90], np.int32), np.diff(splits_E))
    addresses_T = np.array([out_N.ctypes.data, out_N[90:].ctypes.data], np.uint64)
    put_all(addresses_T, np.array([90, 110]), splits_E, local_K, taken_K, True)
    rest_N = np.zeros(200, np.float32)
    outputs: Outputs = [sum_N, touched_W, union_K.copy(), taken_K, out_N]
    splits_E, rounded_K = np.array([0, union_K.size]), np.rint(taken_K)
    return_rounding_error(np.array([0, 200]), splits_E, union_K, taken_K, rounded_K, rest_N, False)
    sent_K = np.empty_like(taken_K)
    publish(union_K, taken_K, rest_N, sent_K)
    return [*outputs, splits_E, union_K, rounded_K, rest_N, sent_K]


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
    return [np.array([kth_magnitude(floats(count, 3), rank) for count, rank in cases])]


def largest() -> Outputs:
    outputs: Outputs = []
    for count, tau in ((63, 1.5), (1000, 2.0)):
        values_N, indices_K = np.rint(2 * floats(count, 6)) / 2, np.zeros(count, np.int32)
        outputs.append(indices_K[: compact(values_N, tau, indices_K)].copy())
    return outputs


def ternary() -> Outputs:
    outputs: Outputs = []
    for count in (4, 4096, 21_000):
        codes_N, back_N = np.zeros(count, np.uint8), np.zeros(count, np.float32)
        ternarise(floats(count, 11), 1.5, 2.0, 2**61 + 5, codes_N)
        packed = np.bitwise_or.reduce(codes_N.reshape(-1, 4) << np.uint8([0, 2, 4, 6]), axis=1)
        assert read_bits(packed, 0.75, back_N)
        outputs += [codes_N, back_N.copy()]
        fields = np.zeros(count * 3 // 8 + 9, np.uint8)
        assert write_levels(back_N, 0.75, 1, 3, fields)
        assert read_levels(fields, 0.75, 1, 3, back_N)
        outputs += [fields, back_N]
    return outputs


def kept_of_rows() -> Outputs:
    outputs: Outputs = []
    for width, k in ((1, 1), (63, 5), (256, 64), (300, 300)):
        x_BN = np.maximum(floats(5 * width, 4), -0.5).reshape(5, width)
        indices_K, values_K = np.zeros(x_BN.size, np.int32), np.zeros(x_BN.size, np.float32)
        tau_B, out_N = np.zeros(5, np.float32), np.ones(x_BN.size, np.float32)
        kept = topk_rows(x_BN, k, indices_K, values_K, tau_B)
        indices_K, values_K = indices_K[:kept], values_K[:kept]
        out_N[:] = 0
        put(indices_K, values_K, out_N)
        outputs += [indices_K, values_K, tau_B, out_N]
    return outputs


def narrowed() -> Outputs:
    words_K = np.random.default_rng(4).integers(0, 2**32, 5000, dtype=np.uint32)
    upper_K = np.empty_like(words_K)
    round_bfloat16(words_K, upper_K)
    return [upper_K]


def coded() -> Outputs:
    indices_K = np.flatnonzero(floats(4000, 5) > 2).astype(np.int32)
    back_K = np.empty_like(indices_K)
    parameter, bits = fit_parameter(indices_K)
    gaps = np.zeros(bits // 8 + 1 + STORE_BYTES, np.uint8)
    encode_gaps(indices_K, parameter, gaps)
    told = [parameter, bits, decode_gaps(gaps, 0, parameter, 4000, back_K)]
    return [np.array(told), gaps, back_K, *sections(0, 4), *sections(200, 4), *sections(0, 2)]


def sections(width: int, value_bytes: int) -> Outputs:
    counts_T, splits_E, parts = np.array([200, 40, 2000, 5000]), [0], []
    for count, chance in zip(counts_T.tolist(), (1.0, 0.5, 0.01, 0.1), strict=True):
        parts.append(np.flatnonzero(np.random.default_rng(8).random(count) < chance))
        splits_E.append(splits_E[-1] + parts[-1].size)
    indices_K = np.concatenate(parts).astype(np.int32)
    values = floats(indices_K.size, 9).view(np.uint8)
    forms_T2, splits_E = np.zeros((4, 2), np.int64), np.array(splits_E)
    out = np.zeros(8 * indices_K.size + STORE_BYTES, np.uint8)
    wanted = Format(width, width == 0, value_bytes)
    write_sections(counts_T, splits_E, wanted, indices_K, values, forms_T2, out)
    sizes_T = np.diff(forms_T2[:, 1], prepend=0)
    data, back_E, back_K = out[: sizes_T.sum()], np.zeros_like(splits_E), np.zeros_like(indices_K)
    data.flags.writeable = False
    back, heads_T3 = np.zeros_like(values), np.stack([forms_T2[:, 0], counts_T, sizes_T], axis=1)
    told = read_sections(data, heads_T3, width, value_bytes, 4, back_E, back_K, back)
    return [np.array(told), forms_T2, data, back_E, back_K, back]


def distinct() -> Outputs:
    rows_L, bits_L = np.array([3, 500, 10_000]), np.array([2, 8, 8])
    ids_FB = np.random.default_rng(6).integers(0, rows_L[:, None], (3, 128))
    keys_FB = np.sort(ids_FB << 8 | np.arange(128), axis=1)
    ids_K, counts_L = np.zeros(ids_FB.size, np.int64), np.zeros(3, np.int64)
    inverse_BF, sum_KD = np.zeros((128, 3), np.int64), np.zeros((ids_FB.size, 4), np.float32)
    ids_K = ids_K[: unique_ids(keys_FB, 8, np.arange(3), ids_K, counts_L, inverse_BF)]
    sum_rows(floats(128 * 3 * 4, 7).reshape(128, 3, 4), inverse_BF, sum_KD)
    message = np.zeros(2000, np.uint8)
    written = encode_ids(ids_K, counts_L, rows_L, bits_L, message)
    back_K, back_L = np.zeros(ids_FB.size, np.int64), np.zeros(3, np.int64)
    told = [written, decode_ids(message[:written], rows_L, bits_L, back_K, back_L)]
    offsets, bags_K = np.zeros(3 * 128 + 1, np.int64), np.zeros(ids_K.size, np.int64)
    bag_offsets(ids_K, counts_L[np.newaxis], back_K, offsets, bags_K)
    return [np.array(told), ids_K, counts_L, inverse_BF, sum_KD, message, back_K, offsets, bags_K]


def cached() -> Outputs:
    rng = np.random.default_rng(11)
    kept_N4, free_S = np.zeros((0, 4), np.int64), np.arange(200)
    outputs: Outputs = []
    for batch in range(8):
        keys_K = np.unique(rng.integers(0, 90, 40))
        rows_M4 = np.zeros((len(kept_N4) + len(keys_K), 4), np.int64)
        where_K2, left_M4 = np.zeros((len(keys_K), 2), np.int64), np.zeros_like(rows_M4)
        fetched = merge_rows(kept_N4, keys_K, batch, free_S, rows_M4, where_K2)
        rows_M4 = rows_M4[: len(kept_N4) + fetched]
        kept_N4 = rows_M4[: part_rows(rows_M4, batch, 3, 50, left_M4)]
        free_S = free_S[fetched:]
        outputs += [where_K2, left_M4, kept_N4]
    return outputs


def updated() -> Outputs:
    rng = np.random.default_rng(8)
    ids_K, offsets_E = rng.integers(0, 20, 100), np.arange(0, 102, 2)[:51]
    starts_F, keys_K = np.array([0, 20]), np.zeros(100, np.int64)
    assert bag_keys(ids_K, offsets_E, starts_F, np.array([20, 20]), 25, 6, keys_K) == -1
    keys_K = sort_by_row(keys_K, 40, 6)
    given = Gradients(keys_K, 6, floats(400, 9).reshape(50, 8))
    weights = [floats(320, 10).reshape(40, 8) for _ in range(5)]
    means, squares = ([np.zeros((40, n), np.float32) for n in sizes] for sizes in ((8, 8), (8, 1)))
    sums = [np.zeros((40, columns), np.float32) for columns in (8, 1)]
    rates = AdamRates(np.array([20, 40]), np.array([[0.1, 1e-8], [0.2, 1e-6]]), 0.9, 0.999)
    update_sgd(weights[0], given, 0.1, 0.01)
    for number in range(2):
        update_adagrad(weights[1 + number], sums[number], given, 0.1, 1e-8, 0.0)
        update_adam(weights[3 + number], means[number], squares[number], given, rates, 0.01)
    return [*weights, *sums, *means, *squares]


def levels_of_rows() -> Outputs:
    outputs: Outputs = []
    indices_K = np.flatnonzero(floats(2000, 11) > 1).astype(np.int32)
    for bits in (3, 4, 8):
        values_K = np.exp(8 * floats(indices_K.size, bits))
        levels_K, codes_B = np.empty(indices_K.size, np.int16), np.empty(20, np.int16)
        quantise(indices_K, values_K, 100, bits, False, levels_K, codes_B)
        back_BN = np.empty((20, 100), np.float32)
        restore(indices_K, levels_K, codes_B, back_BN)
        outputs += [levels_K, codes_B, back_BN]
    return outputs


def leveled() -> Outputs:
    splits_E, local_K = np.array([0, 300, 400]), np.arange(400, dtype=np.int32) * 7
    local_K[300:] -= local_K[300]
    rounded_K = np.zeros(400, np.float32)
    round_to_levels(splits_E, floats(400, 2), rounded_K)
    elements = Elements(splits_E, local_K, rounded_K)
    sender, receiver = (one([(60, 50), (800,)]) for one in (UpdateSender, UpdateReceiver))
    payloads = [sender.encode(0, elements) for _ in range(3)]
    found = [part for one in payloads for part in receiver.decode(one)]
    return [*(np.frombuffer(one.payload, np.uint8) for one in payloads), rounded_K, *found]


ROWS: dict[str, Callable[[], Outputs]] = {
    "select": selected,
    "scatter": scattered,
    "mean": averaged,
    "histogram": ranked,
    "largest": largest,
    "ternary": ternary,
    "narrow": narrowed,
    "indices": coded,
    "rows": kept_of_rows,
    "distinct": distinct,
    "cached": cached,
    "updates": updated,
    "levels": levels_of_rows,
    "levels of updates": leveled,
}


def digests() -> dict[str, str]:
    return {
        name: xxhash.xxh3_64_hexdigest(b"".join(one.tobytes() for one in row()))
        for name, row in ROWS.items()
    }


if __name__ == "__main__":
    json.dump({"processor": config.CPU_NAME, **digests()}, sys.stdout)
