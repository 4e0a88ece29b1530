"""Plants one-line faults in a copy of the package, and checks that the tests named for them fail.

    python scripts/mutate.py
    python scripts/mutate.py --only sidco
    python scripts/mutate.py --sample 5 --seed 3
    python scripts/mutate.py --only dgc --tests tests/compress/gradient/test_gradient_laws.py

Prints a Markdown table; exit code 1 if a fault survives its tests, or if the text that it replaces
is not in its file exactly once.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dlrm_hybrid.report.table import Table
from dlrm_hybrid.rng import fold

REPOSITORY = Path(__file__).parents[1]
TIMEOUT_SECONDS = 600
FAILED = 1  # exit code of pytest when a test fails

GRADIENT = "dlrm_hybrid/compress/gradient"
METHODS = f"{GRADIENT}/methods"
TESTS = "tests/compress/gradient"
LIBRARY = "dlrm_hybrid/compress/library"
LIBRARY_TESTS = "tests/compress/library/test_states.py"
TABLES = "dlrm_hybrid/parallel/tables"
TABLE_TESTS = "tests/parallel"


@dataclass(frozen=True, slots=True)
class Fault:
    """One wrong line, or a few that make sense together only.

    Attributes:
        what: the behaviour that it breaks.
        file: of the package.
        old: text that is there once.
        new: what it becomes.
        tests: arguments of pytest; at least one of these tests must fail.
    """

    what: str
    file: str
    old: str
    new: str
    tests: str


FAULTS = (
    # Nine that lived until November 2026.
    Fault(
        "residual=update: the server multiplies by the learning rate again",
        "dlrm_hybrid/run/assembly/world.py",
        "schedule = Constant(base_lr=1.0)",
        "pass",
        "tests/train/test_gradient_worlds.py -k updates",
    ),
    Fault(
        "CLT-k: trainer 0 always leads",
        f"{GRADIENT}/selector.py",
        "if step % self.trainers == self.trainer:",
        "if self.trainer == 0:",
        f"{TESTS}/test_cltk.py",
    ),
    Fault(
        "DEFT: bins are not rotated",
        f"{GRADIENT}/fragments.py",
        "owners_L = (bins_L - leader) % self.trainers",
        "owners_L = bins_L % self.trainers",
        f"{TESTS}/test_deft.py -k every_fragment",
    ),
    Fault(
        "SIDCo: one stage more at most",
        f"{METHODS}/sidco.py",
        "most = max(1, ceil(log2(nonzero / k)))",
        "most = 1 + max(1, ceil(log2(nonzero / k)))",
        f"{TESTS}/test_sidco.py -k more_stages",
    ),
    Fault(
        "SIDCo: an estimate is used up to 40 times too many elements",
        f"{METHODS}/sidco.py",
        "FAR = 4 ",
        "FAR = 40 ",
        f"{TESTS}/test_sidco.py -k four_times",
    ),
    Fault(
        "RedSync: the search ends at an interval of 0.1",
        f"{METHODS}/redsync.py",
        "NEAR = 0.2 ",
        "NEAR = 0.1 ",
        f"{TESTS}/test_estimated_thresholds.py -k redsync",
    ),
    Fault(
        "DGC: a tenth of the sample",
        f"{METHODS}/dgc.py",
        "ceil(count * self.settings.part)",
        "ceil(count * self.settings.part / 10)",
        f"{TESTS}/test_estimated_thresholds.py -k as_sure",
    ),
    Fault(
        "hard: the magnitude follows the k of the stage",
        f"{METHODS}/hard.py",
        "target_k(context.model_elements, ",
        "target_k(context.layout.size, ",
        f"{TESTS}/test_gradient_methods.py -k hard",
    ),
    Fault(
        "DGC: the bound of the norm is not divided by √trainers",
        f"{METHODS}/dgc.py",
        "sqrt(context.trainers)",
        "sqrt(1)",
        f"{TESTS}/test_gradient_methods.py -k bound",
    ),
    Fault(
        "DCT: a threshold lives on until half as much again has left",
        f"{METHODS}/thresholded.py",
        "4 * (sent - k) > 5 * expected",
        "4 * (sent - k) > 6 * expected",
        f"{TESTS}/test_renewal.py",
    ),
    Fault(
        "drains: all trainers at the same steps",
        f"{GRADIENT}/error_feedback.py",
        '"drain", self.trainer, name',
        '"drain", name',
        f"{TESTS}/test_drain.py",
    ),
    Fault(
        "SIDCo: the mean of a window is divided by one estimate too many",
        f"{METHODS}/sidco.py",
        "elements / (estimates * k)",
        "elements / ((estimates + 1) * k)",
        f"{TESTS}/test_sidco.py -k right_estimate",
    ),
    Fault(
        "GaussianKSGD: up to five thirds of k are near enough",
        f"{METHODS}/gaussian.py",
        "3 * count <= 4 * k",
        "3 * count <= 5 * k",
        f"{TESTS}/test_estimated_thresholds.py -k four_thirds",
    ),
    Fault(
        "DEFT: to keep one element of a fragment costs nothing",
        f"{GRADIENT}/fragments.py",
        "np.maximum(ks_L, 2)",
        "np.maximum(ks_L, 1)",
        f"{TESTS}/test_deft_plan.py",
    ),
    Fault(
        "CLT-k: the filter keeps the other part",
        f"{GRADIENT}/error_feedback.py",
        "residual_N *= self._low_pass",
        "residual_N *= 1 - self._low_pass",
        f"{TESTS}/test_cltk.py",
    ),
    Fault(
        "library: what reached nobody comes back undamped",
        f"{GRADIENT}/error_feedback.py",
        "values_K * self._low_pass)",
        "values_K)",
        LIBRARY_TESTS,
    ),
    Fault(
        "library: other trainers keep tables of levels when a state is loaded",
        f"{LIBRARY}/compressor.py",
        "self._averaging.restart()",
        "pass",
        LIBRARY_TESTS,
    ),
    Fault(
        "library: other groups have the tables of levels",
        f"{LIBRARY}/averaging.py",
        "if exchange.group is not self._group:",
        "if False:",
        LIBRARY_TESTS,
    ),
    Fault(
        "library: parameters of trainers are not compared",
        f"{LIBRARY}/exchange.py",
        "(self._step + self.fingerprint) % _TAGS",
        "self._step % _TAGS",
        LIBRARY_TESTS,
    ),
    Fault(
        "library: an update that is held back is not saved",
        f"{LIBRARY}/compressor.py",
        "copies({**held, **owed})",
        "copies(held)",
        LIBRARY_TESTS,
    ),
    Fault(
        "DGC: momentum of what was sent stays",
        f"{GRADIENT}/transforms.py",
        "if self.masking:",
        "if not self.masking:",
        f"{TESTS}/test_transforms.py",
    ),
    Fault(
        "TernGrad: scales are rounded down",
        f"{GRADIENT}/ternary.py",
        "(scales_Q.view(np.uint32) + _DROPPED) & ~_DROPPED",
        "scales_Q.view(np.uint32) & ~_DROPPED",
        f"{TESTS}/test_terngrad.py",
    ),
    Fault(
        "union: what a trainer selected itself is not put back",
        f"{GRADIENT}/residual.py",
        "if reached is not None:",
        "if reached is not None and not self._is_finite:",
        f"{TESTS}/test_union.py",
    ),
    Fault(
        "agreed elements: what rounding took is lost",
        f"{GRADIENT}/error_feedback.py",
        "x.residual_N[indices.flat] = values_K - rounded_K",
        "pass",
        f"{TESTS}/test_union.py",
    ),
    Fault(
        "DEFT: others may choose from a trainer's fragments",
        f"{GRADIENT}/fragments.py",
        "if counts.tolist() != [chosen_K.size for chosen_K in chosen]:",
        "if False:",
        f"{TESTS}/test_deft.py -k anothers",
    ),
    Fault(
        "rounds: equal elements of two trainers stay twice in a union",
        f"{GRADIENT}/collective.py",
        "index_set(chosen_K[is_first_K], count)",
        "index_set(chosen_K, count)",
        f"{TESTS}/test_union.py",
    ),
    Fault(
        "frames: older versions are read",
        "dlrm_hybrid/wire/frame.py",
        "view[4] != VERSION",
        "view[4] > VERSION",
        "tests/wire/test_frame.py -k version",
    ),
    Fault(
        "sections: a payload may have a byte an element too many",
        "dlrm_hybrid/wire/section.py",
        "dense_bytes + count // 8 + 8",
        "dense_bytes + count + 8",
        "tests/wire/test_frame.py -k byte_too_many",
    ),
    Fault(
        "levels: a bit too many in each field",
        "dlrm_hybrid/wire/ternary.py",
        "return (2 * trainers).bit_length()",
        "return (2 * trainers + 1).bit_length() + 1",
        "tests/wire/test_levels.py",
    ),
    Fault(
        "servers: the version of the first push instead of the last",
        "dlrm_hybrid/parallel/policies.py",
        "return Version(min(self.pushed))",
        "return Version(max(self.pushed))",
        "tests/parallel/test_policies.py",
    ),
    Fault(
        "servers: older versions are kept in the wrong order",
        "dlrm_hybrid/parallel/dense/bucket.py",
        "self._older.rotate()",
        "self._older.rotate(-1)",
        "tests/parallel/test_parameter_server.py -k restarted",
    ),
    Fault(
        "servers: replicas are checked a version later than sync.check_every says",
        "dlrm_hybrid/parallel/dense/server.py",
        "version % self._options.check_every == 0",
        "version % self._options.check_every == 1",
        "tests/parallel/test_parameter_server.py -k every_so_many",
    ),
    Fault(
        "pulls: what rounding leaves out is taken for published",
        "dlrm_hybrid/parallel/dense/published.py",
        "np.add(self.value_N, sent_N, out=self.value_N)",
        "np.copyto(self.value_N, self._weight_N)",
        "tests/parallel/test_compressed_servers.py",
    ),
    Fault(
        "checkpoints: of equally good ones the oldest is the best",
        "dlrm_hybrid/checkpoint/folder.py",
        "score.gain(most.value) > 0:",
        "score.gain(most.value) >= 0:",
        "tests/checkpoint/test_checkpoint.py -k best",
    ),
    Fault(
        "checkpoints: one more than keep.newest stays",
        "dlrm_hybrid/checkpoint/commit.py",
        "found[-keep.newest :]",
        "found[-keep.newest - 1 :]",
        "tests/checkpoint/test_checkpoint.py -k newest_are_kept",
    ),
    Fault(
        "frames: what is behind the last section is not looked at",
        "dlrm_hybrid/wire/section.py",
        "    if at != end:",
        "    if at > end:",
        "tests/wire/test_frame.py -k forged_field",
    ),
    Fault(
        "frames: a checksum that does not fit is taken",
        "dlrm_hybrid/wire/frame.py",
        "if xxhash.xxh3_64_intdigest(view[:end]) != _CHECKSUM",
        "if xxhash.xxh3_64_intdigest(view[:end]) < _CHECKSUM",
        "tests/wire/test_frame.py -k mutant",
    ),
    Fault(
        "dense sections: elements in the order of memory",
        "dlrm_hybrid/wire/dense.py",
        "np.ascontiguousarray(array).reshape(-1)",
        'array.ravel("K")',
        "tests/wire/test_dense.py",
    ),
    Fault(
        "values: a payload may have bytes too many",
        "dlrm_hybrid/wire/dense.py",
        "len(section.payload) != section.count *",
        "len(section.payload) < section.count *",
        "tests/wire/test_values.py",
    ),
    Fault(
        "ternary: a scale may be negative",
        "dlrm_hybrid/wire/ternary.py",
        "math.isfinite(scale) and scale >= 0",
        "math.isfinite(scale)",
        "tests/wire/test_ternary.py",
    ),
    Fault(
        "index sets: a broken payload holds nothing",
        "dlrm_hybrid/wire/sparse.py",
        "    if found < 0:",
        "    if found < -1:",
        "tests/wire/test_index_set.py",
    ),
    Fault(
        "activations: a section too many is not looked at",
        "dlrm_hybrid/compress/activation/codec.py",
        "for section in sections if len(sections) == 1 else ():",
        "for section in sections:",
        "tests/compress/activation",
    ),
    Fault(
        "sketch: one projection for all micro-batches",
        "dlrm_hybrid/compress/activation/controls.py",
        "key.boundary, key.microbatch)",
        "key.boundary)",
        "tests/compress/activation/test_sketch.py",
    ),
    Fault(
        "sketch: the projection is not scaled",
        "dlrm_hybrid/compress/activation/controls.py",
        "/ sqrt(columns)",
        "/ sqrt(width)",
        "tests/compress/activation/test_sketch.py",
    ),
    Fault(
        "servers: the mean is over those that sent an element",
        "dlrm_hybrid/parallel/dense/bucket.py",
        "self._sum_N, len(pushes), ",
        "self._sum_N, max(1, len(pushes) - 1), ",
        "tests/parallel/test_aggregate.py",
    ),
    Fault(
        "servers: values that are not finite are taken",
        "dlrm_hybrid/parallel/dense/bucket.py",
        "self._mean_N[:count], is_finite, ",
        "self._mean_N[:count], True, ",
        "tests/parallel/test_aggregate.py",
    ),
    Fault(
        "resharding: running means of gradients are forgotten",
        "dlrm_hybrid/checkpoint/reader.py",
        '(".residual", ".momentum")',
        '(".residual",)',
        "tests/checkpoint/test_reshard.py",
    ),
    Fault(
        "resharding: one trainer's residual is taken for all",
        "dlrm_hybrid/checkpoint/reader.py",
        "torch.stack(parts).double().mean(0)",
        "parts[0].double()",
        "tests/checkpoint/test_reshard.py",
    ),
    Fault(
        "checkpoints: ranks may disagree on the shape of a tensor",
        "dlrm_hybrid/checkpoint/commit.py",
        '("group", "dtype", "shape")',
        '("group", "dtype")',
        "tests/checkpoint/test_two_phase.py",
    ),
    Fault(
        "checkpoints: a part of a tensor may be missing",
        "dlrm_hybrid/checkpoint/commit.py",
        'if found != math.prod(known["shape"]):',
        'if found > math.prod(known["shape"]):',
        "tests/checkpoint/test_two_phase.py",
    ),
    Fault(
        "leader: a worker may leave before its mate has told what it learned",
        "dlrm_hybrid/train/asynchronous/leader.py",
        "if not orders.can_have(self.topology.stages, 0):",
        "if False:",
        "tests/train/test_leader.py -k leave",
    ),
    # Served tables.
    Fault(
        "tables: a lookup is answered one version too early",
        f"{TABLES}/order.py",
        "question.batch - self.staleness))",
        "question.batch - self.staleness - 1))",
        f"{TABLE_TESTS}/test_table_versions.py",
    ),
    Fault(
        "tables: a version is made when the first trainer has sent its updates",
        f"{TABLES}/order.py",
        "Version(min(self.updated))",
        "Version(max(self.updated))",
        f"{TABLE_TESTS}/test_table_versions.py",
    ),
    Fault(
        "tables: an update that comes twice counts twice",
        f"{TABLES}/order.py",
        "if update.batch < due:",
        "if update.batch < due - 1:",
        f"{TABLE_TESTS}/test_table_versions.py",
    ),
    Fault(
        "tables: an attempt begins with rows of before its checkpoint",
        f"{TABLES}/order.py",
        "max(self.first, question.batch",
        "max(0, question.batch",
        f"{TABLE_TESTS}/test_table_versions.py",
    ),
    Fault(
        "tables in order of arrival: an update that comes twice is applied twice",
        f"{TABLES}/order.py",
        "self._with(thread, Due(turn + 1, due.end))",
        "self._with(thread, Due(turn, due.end))",
        f"{TABLE_TESTS}/test_table_arrivals.py",
    ),
    Fault(
        "tables in order of arrival: the schedule counts updates, not steps",
        f"{TABLES}/order.py",
        "(update,), self.applied // self._trainers",
        "(update,), self.applied",
        f"{TABLE_TESTS}/test_table_arrivals.py",
    ),
    Fault(
        "tables in order of arrival: a trainer that has joined again is refused",
        f"{TABLES}/order.py",
        "if due is None or turn > due.end:",
        "if due is None:",
        f"{TABLE_TESTS}/test_table_arrivals.py",
    ),
    Fault(
        "tables: a trainer at rest has not heard of its last update",
        f"{TABLES}/served.py",
        "        yield from self.receive(split, updated, EVALUATION)\n",
        "",
        f"{TABLE_TESTS}/test_table_arrivals.py",
    ),
    Fault(
        "tables: rows that were looked up ahead are those of one batch later",
        f"{TABLES}/served.py",
        "{self._client.prefix}{batch - self._updated}",
        "{self._client.prefix}{batch - self._updated + 1}",
        f"{TABLE_TESTS}/test_served_tables.py",
    ),
    Fault(
        "tables with a cache: a row serves one batch too long",
        f"{TABLES}/cached.py",
        "batch, self._keys.cache_batches, self._keys.cache_rows",
        "batch, self._keys.cache_batches + 1, self._keys.cache_rows",
        f"{TABLE_TESTS}/test_row_cache.py",
    ),
    Fault(
        "tables with a cache: a sum that was sent is sent again",
        f"{TABLES}/cached.py",
        "self._sums_SD.index_fill_(0, slots_L, 0.0)",
        "self._sums_SD.index_fill_(0, slots_L[:0], 0.0)",
        f"{TABLE_TESTS}/test_cached_tables.py",
    ),
    Fault(
        "tables with a cache: a checkpoint holds the cache of a later batch",
        f"{TABLES}/cached.py",
        "            return flying.turn.before_N4\n",
        "            return self._cache.kept_N4\n",
        f"{TABLE_TESTS}/test_cached_tables.py",
    ),
    Fault(
        "tables: a server draws the rows of its neighbour",
        "dlrm_hybrid/model/table_rows.py",
        "(self._server - drawn) % self._servers",
        "(self._server + drawn) % self._servers",
        "tests/model/test_row_storage.py -k parts",
    ),
    Fault(
        "tables in files: the last reader's rows are left out",
        "dlrm_hybrid/model/row_storage.py",
        "range(0, len(rows_K), size)",
        "range(0, len(rows_K) - 1, size)",
        "tests/model/test_row_storage.py -k number_of_rows",
    ),
    Fault(
        "tables in files: a checkpoint is written from files that go on changing",
        "dlrm_hybrid/checkpoint/writer.py",
        "            return\n        copied",
        "        copied",
        "tests/checkpoint/test_checkpoint.py -k before_the_writer_returns",
    ),
    # Levels, tables, asynchronous trainers, DSP, library, predict, export, rows of files.
    Fault(
        "levels of gradients: values that are no levels are coded",
        "dlrm_hybrid/wire/gradient_levels.py",
        "if not quanta(splits_E, values_K, exponents_T):",
        "if quanta(splits_E, values_K, exponents_T) is None:",
        "tests/wire/test_gradient_levels.py -k other_values",
    ),
    Fault(
        "levels of gradients: without zeros positions are those of others",
        "dlrm_hybrid/wire/gradient_levels.py",
        "given.indices_K[kept_K], given.values_K[kept_K]",
        "given.indices_K[: kept_K.size], given.values_K[kept_K]",
        "tests/wire/test_gradient_levels.py -k 15_bits",
    ),
    Fault(
        "levels of gradients: sections of other tensors are read",
        "dlrm_hybrid/wire/gradient_levels.py",
        "if section.encoding is not Encoding.CODED or section.count != count:",
        "if section.encoding is not Encoding.CODED:",
        "tests/wire/test_gradient_levels.py -k does_not_fit",
    ),
    Fault(
        "levels of activations: no signs follow",
        "dlrm_hybrid/wire/activation_levels.py",
        "is_signed = not is_gradient and bool((levels_K < 0).any())",
        "is_signed = False",
        "tests/wire/test_activation_levels.py -k every_message",
    ),
    Fault(
        "levels of activations: a receiver reads classes of levels a bit too far",
        "dlrm_hybrid/wire/activation_levels.py",
        "classes_N >> np.uint8(_LEVEL_SHIFT)",
        "classes_N >> np.uint8(_LEVEL_SHIFT + 1)",
        "tests/wire/test_activation_levels.py -k every_message",
    ),
    Fault(
        "levels of gradients: tables that came without their popularity are kept",
        "dlrm_hybrid/wire/gradient_levels.py",
        "                self._tables.forget()  # they serve nothing without it\n",
        "",
        "tests/wire/test_gradient_levels.py -k without_popularity",
    ),
    Fault(
        "levels of activations: the lowest step is written the other way round",
        "dlrm_hybrid/wire/activation_levels.py",
        'lowest.to_bytes(2, "little")',
        'lowest.to_bytes(2, "big")',
        "tests/wire/test_activation_levels.py -k every_message",
    ),
    Fault(
        "tables: a trainer's gradient is not divided by the trainers",
        "dlrm_hybrid/parallel/tables/shared.py",
        "mean_part(one.gradient_BFD, len(requests))",
        "mean_part(one.gradient_BFD, 1)",
        'tests/train/test_world_matrix.py -k "plain_training and lists-3"',
    ),
    Fault(
        "tables: gradients do not pass the rounding of the wire",
        "dlrm_hybrid/parallel/tables/shared.py",
        "[self.rounding.gradient(ids.sum_by_id(one)) for ids, one in pairs]",
        "[ids.sum_by_id(one) for ids, one in pairs]",
        "tests/parallel/test_tables.py",
    ),
    Fault(
        "tables: a server applies the rate of the first step for ever",
        "dlrm_hybrid/parallel/tables/table_server.py",
        "self._schedule.lr(action.step)",
        "self._schedule.lr(0)",
        'tests/train/test_world_matrix.py -k "plain_training and served-sgd-decay"',
    ),
    Fault(
        "tables: what a batch asks again is another's",
        "dlrm_hybrid/parallel/tables/lookups.py",
        "ids.ids_K[one] // servers",
        "ids.ids_K[one] // max(1, servers - 1)",
        "tests/parallel/test_lookups.py -k arrives",
    ),
    Fault(
        "tables: bytes of more ids than were looked up are taken",
        "dlrm_hybrid/parallel/tables/lookups.py",
        "if ids_K is None or not len(ids_K) <= lookups <= most * len(rows_F):",
        "if ids_K is None:",
        "tests/parallel/test_lookups.py -k other_bytes",
    ),
    Fault(
        "tables with Adam: the first mean is corrected by the second beta",
        "dlrm_hybrid/model/rows/optimizer.py",
        "lr * root / (1 - first**step)",
        "lr * root / (1 - second**step)",
        "tests/model/test_table_kernels.py -k bias_corrections",
    ),
    Fault(
        "tables with Adam: the mean of squares is not corrected",
        "dlrm_hybrid/model/rows/optimizer.py",
        "root = sqrt(1 - second**step)",
        "root = 1.0",
        "tests/model/test_table_kernels.py -k learn_what_torch",
    ),
    Fault(
        "tables with SGD: no weight decay",
        "dlrm_hybrid/model/rows/optimizer.py",
        "update_sgd(weights_RD, given, lr, decay)",
        "update_sgd(weights_RD, given, lr, 0.0)",
        "tests/model/test_table_kernels.py -k learn_what_torch",
    ),
    Fault(
        "tables of bags: lengths of others' batches are those of the own",
        "dlrm_hybrid/model/exchange/distinct.py",
        "their_sizes_TX[:, 0].tolist(), their_sizes_TX[:, -1].tolist()",
        "their_sizes_TX[:, 0].tolist(), their_sizes_TX[:, 0].tolist()",
        "tests/model/test_sharded_bags.py",
    ),
    Fault(
        "async: the rate follows pushes, not steps",
        "dlrm_hybrid/parallel/policies.py",
        "number=self.applied // self.policy.trainers",
        "number=self.applied",
        "tests/parallel/test_asynchronous.py -k rate",
    ),
    Fault(
        "async: staleness is counted from the newest answer",
        "dlrm_hybrid/parallel/policies.py",
        "staleness=self.applied - before.sent[0]",
        "staleness=self.applied - before.sent[-1]",
        "tests/parallel/test_asynchronous.py -k staleness",
    ),
    Fault(
        "async: a push more may be in flight",
        "dlrm_hybrid/parallel/policies.py",
        "pushed - self.most_in_flight + 1",
        "pushed - self.most_in_flight",
        "tests/parallel/test_asynchronous_servers.py -k one_trainer",
    ),
    Fault(
        "async: a lost trainer's batches are given out twice",
        "dlrm_hybrid/train/asynchronous/leases.py",
        "returned=self.returned[count:]",
        "returned=self.returned",
        "tests/train/test_leases.py -k lost",
    ),
    Fault(
        "async: what is under way does not count as ahead",
        "dlrm_hybrid/train/asynchronous/leases.py",
        "self.done[trainer] - self.since[trainer] + len(self.under_way[trainer])",
        "self.done[trainer] - self.since[trainer]",
        "tests/train/test_leases.py -k ahead",
    ),
    Fault(
        "async: a rest that is wished for comes a step late",
        "dlrm_hybrid/train/asynchronous/leases.py",
        "-(-self.given // self.trainers) * self.trainers",
        "(self.given // self.trainers + 1) * self.trainers",
        "tests/train/test_leases.py -k soon",
    ),
    Fault(
        "rounds: batches of lost trainers are dealt and counted as new",
        "dlrm_hybrid/train/asynchronous/turns.py",
        "given=self.given + len(left) - again",
        "given=self.given + len(left)",
        "tests/train/test_turns.py -k whoever",
    ),
    Fault(
        "rounds: whoever has left is waited for",
        "dlrm_hybrid/parallel/policies.py",
        "replace(self, live=self.live - {worker})._ended()",
        "replace(self, live=self.live - {worker}), ()",
        "tests/parallel/test_live_rounds.py -k left",
    ),
    Fault(
        "DSP: a gradient waits a tick too long",
        "dlrm_hybrid/parallel/schedule.py",
        'Op("B", 0, forward + self.staleness[stage])',
        'Op("B", 0, forward + self.staleness[stage] + 1)',
        "tests/parallel/test_diversely_stale.py -k first_ticks",
    ),
    Fault(
        "DSP: delays of a stage count for itself",
        "dlrm_hybrid/parallel/schedule.py",
        "sum(self.delays[:stage])",
        "sum(self.delays[: stage + 1])",
        "tests/parallel/test_diversely_stale.py -k first_ticks",
    ),
    Fault(
        "DSP: what is under way is one batch short",
        "dlrm_hybrid/parallel/schedule.py",
        "range(received, sent)",
        "range(received + 1, sent)",
        "tests/parallel/test_stale_worlds.py -k saved",
    ),
    Fault(
        "DSP: backward has the weights of forward",
        "dlrm_hybrid/parallel/stage.py",
        "flying.graphs[microbatch] = replace(graph, left=None)",
        "flying.graphs[microbatch] = graph",
        "tests/parallel/test_stage.py -k dropped",
    ),
    Fault(
        "pipelines: gradients of micro-batches are not divided by their number",
        "dlrm_hybrid/parallel/stage.py",
        "torch.tensor(1 / self.microbatches, dtype=graph.left.dtype)",
        "torch.tensor(1.0, dtype=graph.left.dtype)",
        "tests/parallel/test_stage.py -k microbatches_sum",
    ),
    Fault(
        "library: packets are summed, not averaged",
        "dlrm_hybrid/compress/library/averaging.py",
        "        for own in values:\n            own.div_(exchange.size)\n        return",
        "        return",
        "tests/compress/library/test_averaging.py -k means",
    ),
    Fault(
        "library: agreed values are summed, not averaged",
        "dlrm_hybrid/compress/library/averaging.py",
        "            mean_K /= np.float32(exchange.size)\n",
        "",
        "tests/compress/library/test_averaging.py -k means",
    ),
    Fault(
        "library: dense means are divided by the other trainers",
        "dlrm_hybrid/compress/library/exchange.py",
        "sums.sum(0).div_(self.size)",
        "sums.sum(0).div_(max(1, self.size - 1))",
        "tests/compress/library/test_averaging.py",
    ),
    Fault(
        "boundary: of ties only some are kept",
        "dlrm_hybrid/compress/library/boundary.py",
        "kept = ~(magnitudes < tau) & (x != 0)",
        "kept = (magnitudes > tau) & (x != 0)",
        "tests/compress/library/test_sparse_boundary.py -k torch_alone",
    ),
    Fault(
        "boundary: evaluations are masked whatever was said",
        "dlrm_hybrid/compress/library/boundary.py",
        "if not x.numel() or not (self.training or self.evaluate_masked):",
        "if not x.numel():",
        "tests/compress/library/test_sparse_boundary.py -k let_alone",
    ),
    Fault(
        "library: gradients that are not finite join the residual",
        "dlrm_hybrid/compress/library/parameters.py",
        "if not math.isfinite(float(one.sum())) and not bool(one.isfinite().all()):",
        "if False:",
        "tests/compress/library/test_packets.py -k changes_nothing",
    ),
    Fault(
        "predict: values of a column are scored by the first category's id",
        "dlrm_hybrid/saved/encoding.py",
        "ids_M = ids_M[coded.index_M]",
        "ids_M = ids_M[coded.index_M * 0]",
        "tests/predict/test_own_tables.py -k new_rows",
    ),
    Fault(
        "predict: an unknown category takes the last known row",
        "dlrm_hybrid/saved/encoding.py",
        "0 if vocabulary.first_id else vocabulary.table_rows",
        "0 if vocabulary.first_id else vocabulary.table_rows - 1",
        "tests/predict/test_predict.py -k row_of_zeros",
    ),
    Fault(
        "predict: of unknown categories the last is named",
        "dlrm_hybrid/saved/encoding.py",
        "unknown.row < refusal.row",
        "unknown.row > refusal.row",
        "tests/data/test_table_sources.py -k unknown",
    ),
    Fault(
        "predict: rows are numbered anew in each block",
        "dlrm_hybrid/predict/scoring.py",
        "np.arange(rows, rows + len(logit_R))",
        "np.arange(len(logit_R))",
        "tests/predict/test_predict.py -k numbered",
    ),
    Fault(
        "export: squares of a machine's vectors are added",
        "dlrm_hybrid/export/plain.py",
        "z_BVD.sum(1).square() - z_BVD.square().sum(1)",
        "z_BVD.sum(1).square() + z_BVD.square().sum(1)",
        "tests/export/test_plain_interactions.py -k same_logits",
    ),
    Fault(
        "export: cross layers multiply their own input",
        "dlrm_hybrid/export/plain.py",
        "x_BW + x0_BW * functional.linear",
        "x_BW + x_BW * functional.linear",
        "tests/export/test_plain_interactions.py -k same_logits",
    ),
    Fault(
        "export: an unknown id is the first row",
        "dlrm_hybrid/export/plain.py",
        "return rows * (ids >= 0).unsqueeze(-1)",
        "return rows",
        "tests/export/test_multi_hot.py -k unknown",
    ),
    Fault(
        "export: 8-bit rows lose their least value",
        "dlrm_hybrid/export/plain.py",
        "steps * scale.unsqueeze(-1) + offset.unsqueeze(-1)",
        "steps * scale.unsqueeze(-1)",
        "tests/export/test_export.py -k 8_bits",
    ),
    Fault(
        "export: columns of TorchRec's top layer are ours",
        "dlrm_hybrid/export/names.py",
        "mixed_MW[:, columns_in_torchrec(spec)] = ours[MIXED]",
        "mixed_MW[:] = ours[MIXED]",
        "tests/export/test_export.py -k way_back",
    ),
    Fault(
        "import: a variance below 0 is taken",
        "dlrm_hybrid/export/weights.py",
        "elif name.endswith(VARIANCE) and bool((tensor < 0).any()):",
        "elif False:",
        "tests/export/test_batch_norm.py -k weights_and_statistics",
    ),
    Fault(
        "rows: the last batch of an epoch is left out",
        "dlrm_hybrid/data/loader.py",
        "if self._rows - used < 2 * self._global_rows:",
        "if self._rows - used <= 2 * self._global_rows:",
        "tests/data/test_loader.py -k once",
    ),
    Fault(
        "rows: trainers read the same part",
        "dlrm_hybrid/data/loader.py",
        "epoch.position(used + trainer * self._batch_size)",
        "epoch.position(used)",
        "tests/data/test_loader.py -k parts_of_all",
    ),
    Fault(
        "rows: every epoch has the order of the first",
        "dlrm_hybrid/data/loader.py",
        'fold(self._seed, "loader", epoch, name)',
        'fold(self._seed, "loader", 0, name)',
        "tests/data/test_loader.py -k depends_on",
    ),
    Fault(
        "tables of files: a category must be seen once more than min_count says",
        "dlrm_hybrid/data/sources/tables.py",
        ">= max(1, column.min_count)",
        "> max(1, column.min_count)",
        "tests/data/test_table_sources.py -k plain_reading",
    ),
    Fault(
        "tables of files: dense values keep their mean",
        "dlrm_hybrid/data/sources/columns.py",
        "((dense_NI - means) / deviations)",
        "(dense_NI / deviations)",
        "tests/data/test_table_sources.py",
    ),
)


def main() -> None:
    """Plant the faults that were asked for, one after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="faults of which the text or the file contains this")
    parser.add_argument("--sample", type=int, metavar="N", help="so many of them, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", help="arguments of pytest instead of those beside the faults")
    options = parser.parse_args()
    chosen = _chosen(options.only, options.sample, options.seed)
    misplaced = [fault for fault in chosen if not is_placed(fault)]
    for fault in misplaced:
        print(f"{fault.file}: not there, or more than once: {fault.old!r}", file=sys.stderr)
    if misplaced:
        sys.exit(1)
    survivors = 0
    rows: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        _copy_repository(copy)
        for fault in chosen:
            since = time.monotonic()
            with _planted(fault, copy / fault.file):
                outcome = _outcome(copy, shlex.split(options.tests or fault.tests))
            survivors += outcome != "killed"
            seconds = f"{time.monotonic() - since:.0f}"
            rows.append((fault.what, Path(fault.file).name, outcome, seconds))
            print(f"{outcome} ({seconds} s): {fault.what}", file=sys.stderr, flush=True)
    print(Table(("fault", "file", "outcome", "seconds"), rows, "lllr").markdown())
    print(f"\n{len(chosen) - survivors} faults killed, {survivors} not")
    sys.exit(survivors > 0)


def _chosen(only: str | None, sample: int | None, seed: int) -> Sequence[Fault]:
    found = [one for one in FAULTS if only is None or only.lower() in (one.what + one.file).lower()]
    if sample is not None:
        found = sorted(found, key=lambda one: fold(seed, "mutate", one.what))[:sample]
    return found


def is_placed(fault: Fault) -> bool:
    """Whether the text that a fault replaces is where it should be, once."""
    path = REPOSITORY / fault.file
    return path.is_file() and path.read_text(encoding="utf-8").count(fault.old) == 1


def _copy_repository(copy: Path) -> None:
    """Everything that git knows or would add."""
    command = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=True).stdout
    for name in listed.decode().split("\0"):
        if name and (REPOSITORY / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(REPOSITORY / name, copy / name)


@contextmanager
def _planted(fault: Fault, path: Path) -> Generator[None, None, None]:
    right = path.read_text(encoding="utf-8")
    path.write_text(right.replace(fault.old, fault.new), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(right, encoding="utf-8")


def _outcome(copy: Path, tests: list[str]) -> str:
    """Of pytest in the copy: `killed`, `SURVIVED`, or why neither can be said."""
    # Two versions of a file within a second would share their bytecode.
    environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(copy)}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(
            command,
            cwd=copy,
            env=environ,
            timeout=TIMEOUT_SECONDS,
            capture_output=True,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "killed"  # the fault makes it hang
    if done.returncode == FAILED:
        return "killed"
    if done.returncode == 0:
        return "SURVIVED"
    return f"NOT RUN: {done.stdout.strip().splitlines()[-1:]}"


if __name__ == "__main__":
    main()
