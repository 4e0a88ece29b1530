"""Triton kernels: what `ops` does with one vector, done with all tensors of a model on a GPU.

The residuals of all tensors lie in one vector, each from a multiple of four elements on; gradients
stay where autograd has put them. Every launch covers all tensors: each program takes one chunk of
one tensor, which `table` names. Nothing here waits for the host, and what a later kernel needs to
know (a threshold, whether a tensor takes part) it reads from memory.

Magnitudes are compared as the 31 bits of a float32 without its sign, which order alike: exact for
the smallest numbers too, and a NaN reaches every threshold.

Shapes: C chunks of CHUNK elements, of T tensors; row c of `table_C4` (int64) is the tensor, the
chunk's first element in it, the tensor's size and where its residual begins. W = CHUNK / 32 words,
J thresholds, H bins in R copies, K selected, S sampled.
"""

# No postponed annotations: Triton reads which parameters are constants.
import triton
import triton.language as tl

BINS = tl.constexpr(2048)
"""Bins of a histogram: by 11 of a magnitude's 31 bits, then by 10, then by 10."""
BROKEN = tl.constexpr(1)
USED = tl.constexpr(2)
OVERFLOWN = tl.constexpr(4)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_INFINITY = tl.constexpr(0x7F800000)


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True) & _MAGNITUDE


@triton.jit
def _ones(word):
    """How many bits of a uint32 are set."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    return (((word + (word >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24


@triton.jit
def _row(table_C4):
    """Tensor, first element, size and place of this program's chunk."""
    row = table_C4 + 4 * tl.program_id(0)
    start = tl.multiple_of(tl.load(row + 1).to(tl.int32), 32)
    size = tl.load(row + 2).to(tl.int32)
    return tl.load(row).to(tl.int32), start, size, tl.multiple_of(tl.load(row + 3), 4)


@triton.jit
def _pointer(addresses_T, tensor, ALIGNED: tl.constexpr):
    base = tl.load(addresses_T + tensor).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        base = tl.multiple_of(base, 16)
    return base


@triton.jit
def _read(base, start, size, CHUNK: tl.constexpr):
    """A chunk; zeros behind its tensor's end. Without a mask loads are 16 bytes wide."""
    at = start + tl.arange(0, CHUNK)
    if start + CHUNK <= size:
        x = tl.load(base + at)
    else:
        x = tl.load(base + at, mask=at < size, other=0.0)
    return x


@triton.jit
def _write(base, start, size, x, CHUNK: tl.constexpr):
    at = start + tl.arange(0, CHUNK)
    if start + CHUNK <= size:
        tl.store(base + at, x)
    else:
        tl.store(base + at, x, mask=at < size)


@triton.jit
def _sum(
    table_C4,
    addresses_T,
    residual,
    fault,
    ADDS: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The tensor of a chunk, and residual plus gradient; with ADDS they are added here, for good.

    Where a gradient of any tensor is not finite (`fault`) nothing is added.
    """
    tensor, start, size, place = _row(table_C4)
    x = _read(residual + place, start, size, CHUNK)
    if ADDS:
        if tl.load(fault) == 0:
            x += _read(_pointer(addresses_T, tensor, ALIGNED), start, size, CHUNK)
            _write(residual + place, start, size, x, CHUNK)
    return tensor, x


@triton.jit
def _is_active(table_C4, active_T):
    """Whether the tensor of this program's chunk takes part."""
    return tl.load(active_T + tl.load(table_C4 + 4 * tl.program_id(0))) != 0


@triton.jit
def inspect(table_C4, addresses_T, flags_E, tensors, ALIGNED: tl.constexpr, CHUNK: tl.constexpr):
    """Set BROKEN for gradients that are not finite, USED for those with an element that is not 0.

    The last flag, behind those of the tensors, is BROKEN if any is.
    """
    tensor, start, size, _ = _row(table_C4)
    bits = _bits(_read(_pointer(addresses_T, tensor, ALIGNED), start, size, CHUNK))
    largest = tl.max(bits)
    flags = tl.where(largest >= _INFINITY, BROKEN, 0) | tl.where(largest > 0, USED, 0)
    if flags & ~tl.load(flags_E + tensor) != 0:  # else one address would take all atomics
        tl.atomic_or(flags_E + tensor, flags, sem="relaxed")
        tl.atomic_or(flags_E + tensors, flags & BROKEN, sem="relaxed")


@triton.jit
def moments(
    table_C4,
    addresses_T,
    residual,
    fault,
    sums_3C,
    largest_T,
    nonzero_T,
    chunks,
    ADDS: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Store of each chunk the float64 sums of values, magnitudes and squares.

    Of each tensor the bits of the largest magnitude, and the number of elements that are not 0.
    """
    tensor, x = _sum(table_C4, addresses_T, residual, fault, ADDS, ALIGNED, CHUNK)
    chunk = tl.program_id(0)
    bits, wide = _bits(x), x.to(tl.float64)
    tl.store(sums_3C + chunk, tl.sum(wide))
    tl.store(sums_3C + chunks + chunk, tl.sum(tl.abs(wide)))
    tl.store(sums_3C + 2 * chunks + chunk, tl.sum(wide * wide))
    tl.atomic_max(largest_T + tensor, tl.max(bits), sem="relaxed")
    tl.atomic_add(nonzero_T + tensor, tl.sum((bits > 0).to(tl.int32)).to(tl.int64), sem="relaxed")


@triton.jit
def excesses(
    table_C4,
    addresses_T,
    residual,
    fault,
    active_T,
    taus_TJ,
    sums_J2C,
    counts_TJ,
    chunks,
    J: tl.constexpr,
    ADDS: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Over the magnitudes above each of J thresholds: float64 sums of excesses, and their squares.

    A threshold (float64) is rounded to float32 for the comparison; of NaN nothing is above.
    """
    is_active = _is_active(table_C4, active_T)
    if is_active | ADDS:
        tensor, x = _sum(table_C4, addresses_T, residual, fault, ADDS, ALIGNED, CHUNK)
        if is_active:
            bits, wide = _bits(x), tl.abs(x.to(tl.float64))
            at = sums_J2C + tl.program_id(0)
            for j in tl.static_range(J):
                tau = tl.load(taus_TJ + J * tensor + j)
                above = bits > _bits(tau.to(tl.float32))
                over = tl.where(above, wide - tau, 0.0)
                tl.store(at + 2 * j * chunks, tl.sum(over))
                tl.store(at + (2 * j + 1) * chunks, tl.sum(over * over))
                tl.atomic_add(
                    counts_TJ + J * tensor + j,
                    tl.sum(above.to(tl.int32)).to(tl.int64),
                    sem="relaxed",
                )


@triton.jit
def add_up(sums_MC, firsts_E, totals_MT, chunks, STEP: tl.constexpr):
    """The sums of each tensor from those of its chunks, always in the same order."""
    tensor, row = tl.program_id(0), tl.program_id(1)
    first, last = tl.load(firsts_E + tensor), tl.load(firsts_E + tensor + 1)
    total = tl.zeros((STEP,), tl.float64)
    while first < last:
        at = first + tl.arange(0, STEP)
        total += tl.load(sums_MC + row * chunks + at, mask=at < last, other=0.0)
        first += STEP
    tl.store(totals_MT + row * tl.num_programs(0) + tensor, tl.sum(total))


@triton.jit
def looks(
    table_C4,
    addresses_T,
    residual,
    fault,
    active_T,
    taus_TJ,
    counts_TJ,
    J: tl.constexpr,
    ADDS: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """How many magnitudes reach each of J float32 thresholds, but no zeros."""
    is_active = _is_active(table_C4, active_T)
    if is_active | ADDS:
        tensor, x = _sum(table_C4, addresses_T, residual, fault, ADDS, ALIGNED, CHUNK)
        if is_active:
            bits = _bits(x)
            for j in tl.static_range(J):
                limit = tl.maximum(_bits(tl.load(taus_TJ + J * tensor + j)), 1)
                count = tl.sum((bits >= limit).to(tl.int32)).to(tl.int64)
                tl.atomic_add(counts_TJ + J * tensor + j, count, sem="relaxed")


@triton.jit
def sample(
    sizes_T,
    places_T,
    strides_T,
    addresses_T,
    residual,
    fault,
    bins_RTH,
    copies,
    ADDS: tl.constexpr,
    SAMPLES: tl.constexpr,
):
    """A histogram of every so many elements of each tensor, by the upper 11 bits; none of zeros.

    A grid of (blocks of SAMPLES, T); a stride of 0 leaves a tensor out.
    """
    tensor = tl.program_id(1)
    stride, size = tl.load(strides_T + tensor), tl.load(sizes_T + tensor)
    first = tl.program_id(0) * SAMPLES
    if (stride > 0) & (first * stride < size):
        at = (first + tl.arange(0, SAMPLES)) * stride
        x = tl.load(residual + tl.load(places_T + tensor) + at, mask=at < size, other=0.0)
        if ADDS:
            if tl.load(fault) == 0:
                gradient = _pointer(addresses_T, tensor, False)
                x += tl.load(gradient + at, mask=at < size, other=0.0)
        bits = _bits(x)
        copy = tl.program_id(0) % copies
        bins = bins_RTH + (copy * tl.num_programs(1) + tensor) * BINS
        tl.atomic_add(bins + (bits >> 20), 1, mask=bits > 0, sem="relaxed")


@triton.jit
def draw(sizes_T, places_T, drawn_T, to_T, seeds_T, residual, sample, SAMPLES: tl.constexpr):
    """A random element of each of as many equal blocks of each tensor, as `thresholds.dgc.sample`.

    A grid of (blocks of SAMPLES, T); the draws are those of `rng.splitmix64`.
    """
    tensor = tl.program_id(1)
    size, drawn = tl.load(sizes_T + tensor), tl.load(drawn_T + tensor)
    first = tl.program_id(0).to(tl.int64) * SAMPLES
    if first < drawn:
        at = first + tl.arange(0, SAMPLES)
        begin, end = at * size // drawn, (at + 1) * size // drawn
        word = tl.load(seeds_T + tensor).to(tl.uint64)
        word += (at + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB
        word = word ^ (word >> 31)
        length = tl.maximum(end - begin, 1).to(tl.uint64)
        chosen = begin + (word % length).to(tl.int64)
        inside = at < drawn
        x = tl.load(residual + tl.load(places_T + tensor) + chosen, mask=inside, other=0.0)
        tl.store(sample + tl.load(to_T + tensor) + at, x, mask=inside)


@triton.jit
def histogram(
    table_C4,
    addresses_T,
    residual,
    fault,
    active_T,
    prefix_T,
    bins_RTH,
    tensors,
    copies,
    LEVEL: tl.constexpr,
    ADDS: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """A histogram of each active tensor's magnitudes by their next bits; none of zeros.

    At level 0 of all that reach `prefix_T`, at the others of those that begin with its bits.
    """
    is_active = _is_active(table_C4, active_T)
    if is_active | ADDS:
        tensor, x = _sum(table_C4, addresses_T, residual, fault, ADDS, ALIGNED, CHUNK)
        if is_active:
            bits, prefix = _bits(x), tl.load(prefix_T + tensor)
            if LEVEL == 0:
                counts, bin_ = bits >= tl.maximum(prefix, 1), bits >> 20
            elif LEVEL == 1:
                counts, bin_ = ((bits >> 20) == prefix) & (bits > 0), (bits >> 10) & 1023
            else:
                counts, bin_ = ((bits >> 10) == prefix) & (bits > 0), bits & 1023
            copy = tl.program_id(0) % copies
            tl.atomic_add(
                bins_RTH + (copy * tensors + tensor) * BINS + bin_, 1, mask=counts, sem="relaxed"
            )


@triton.jit
def find(
    bins_RTH,
    active_T,
    ranks_T,
    prefix_T,
    missed_T,
    tensors,
    COPIES: tl.constexpr,
    LEVEL: tl.constexpr,
):
    """Find of each active tensor the bin that holds a rank from the top, and the rank inside it.

    Appends the bin to the bits of `prefix_T` and clears the histogram. LEVEL -1 is that of a
    sample: its bin becomes a lower bound, and ranks stay. Where level 0 has counted fewer than the
    rank the bound was too high, or the rest is zeros: then no bits are known, and the tensor is
    `missed`.
    """
    tensor = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    for copy in tl.static_range(COPIES):
        place = bins_RTH + (copy * tensors + tensor) * BINS + bins
        counts += tl.load(place)
        tl.store(place, tl.zeros((BINS,), tl.int32))
    if tl.load(active_T + tensor) != 0:
        rank, prefix = tl.load(ranks_T + tensor), tl.load(prefix_T + tensor)
        reach = tl.cumsum(counts, reverse=True)
        bin_ = tl.sum((reach >= rank).to(tl.int32)) - 1
        above = tl.sum(tl.where(bins == bin_, reach - counts, 0))
        if LEVEL <= 0:
            tl.store(missed_T + tensor, (bin_ < 0).to(tl.int32))
            prefix = 0
        if LEVEL == -1:
            tl.store(prefix_T + tensor, tl.maximum(bin_, 0) << 20)
        elif bin_ >= 0:
            tl.store(prefix_T + tensor, bin_ if LEVEL == 0 else (prefix << 10) | bin_)
            tl.store(ranks_T + tensor, rank - above)
        else:
            tl.store(prefix_T + tensor, prefix << 10 if LEVEL > 0 else 0)


@triton.jit
def mark(
    table_C4,
    addresses_T,
    residual,
    flags_E,
    taus_T,
    targets_T,
    words_CW,
    counts_C,
    tensors,
    ADDS: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Move what reaches its tensor's threshold, but no zeros, from the residual to the targets.

    All other elements of the targets become 0. Sets a bit for each that was moved, and counts those
    of each chunk. Where a gradient is not finite nothing happens; where a sum is not that is
    OVERFLOWN.
    """
    tensor, start, size, place = _row(table_C4)
    chunk = tl.program_id(0)
    count = 0
    if tl.load(flags_E + tensors) == 0:
        x = _read(residual + place, start, size, CHUNK)
        if ADDS:
            x += _read(_pointer(addresses_T, tensor, ALIGNED), start, size, CHUNK)
        bits = _bits(x)
        leaves = bits >= tl.maximum(_bits(tl.load(taus_T + tensor)), 1)
        _write(_pointer(targets_T, tensor, ALIGNED), start, size, tl.where(leaves, x, 0.0), CHUNK)
        if ADDS:
            _write(residual + place, start, size, tl.where(leaves, 0.0, x), CHUNK)
        else:
            at = residual + place + start + tl.arange(0, CHUNK)
            tl.store(at, tl.zeros((CHUNK,), tl.float32), mask=leaves)
        shifted = leaves.to(tl.uint32) << (tl.arange(0, CHUNK) % 32).to(tl.uint32)
        words = tl.sum(tl.reshape(shifted, (CHUNK // 32, 32)), 1)
        word_at = chunk * (CHUNK // 32) + tl.arange(0, CHUNK // 32)
        tl.store(words_CW + word_at, words.to(tl.int32))
        count = tl.sum(leaves.to(tl.int32))
        if tl.max(bits) >= _INFINITY:
            tl.atomic_or(flags_E + tensor, OVERFLOWN, sem="relaxed")
            tl.atomic_or(flags_E + tensors, OVERFLOWN, sem="relaxed")
    tl.store(counts_C + chunk, count)


@triton.jit
def compact(
    table_C4,
    sources_T,
    words_CW,
    splits_F,
    offsets_E,
    indices_K,
    values_K,
    room,
    CHUNK: tl.constexpr,
):
    """List what `mark` has moved, in increasing order of flat indices; it becomes 0.

    Of the sources only marked elements are read: each lane follows the bits of one word.
    `splits_F` says where the selected of each chunk begin, then K. Those without room are left.
    """
    chunk = tl.program_id(0)
    first, end = tl.load(splits_F + chunk), tl.load(splits_F + chunk + 1)
    if end > first:
        tensor, start, _, _ = _row(table_C4)
        W: tl.constexpr = CHUNK // 32
        lanes = tl.arange(0, W)
        words = tl.load(words_CW + chunk * W + lanes).to(tl.uint32, bitcast=True)
        counts = _ones(words).to(tl.int32)
        to = first + tl.cumsum(counts) - counts
        base = _pointer(sources_T, tensor, False)
        offset = tl.load(offsets_E + tensor)
        most = tl.max(counts)
        while most > 0:
            mask = (words != 0) & (to < room)
            rest = words & (words - 1)
            at = start + 32 * lanes + _ones((words ^ rest) - 1).to(tl.int32)
            tl.store(values_K + to, tl.load(base + at, mask=mask, other=0.0), mask=mask)
            tl.store(indices_K + to, (offset + at).to(tl.int32), mask=mask)
            tl.store(base + at, tl.zeros((W,), tl.float32), mask=mask)
            to += 1
            words = rest
            most -= 1


@triton.jit
def scatter(
    indices_K,
    values_K,
    offsets_E,
    addresses_T,
    count,
    tensors,
    BITS: tl.constexpr,
    SELECTED: tl.constexpr,
):
    """Add values to elements of tensors, named by flat indices of which none is there twice."""
    k = tl.program_id(0) * SELECTED + tl.arange(0, SELECTED)
    inside = k < count
    flat = tl.load(indices_K + k, mask=inside, other=0).to(tl.int64)
    tensor = tl.zeros((SELECTED,), tl.int32)
    for bit in tl.static_range(BITS):  # the last tensor that begins at or before it
        higher = tensor + (1 << (BITS - 1 - bit))
        begins = tl.load(offsets_E + higher, mask=higher < tensors, other=1 << 62)
        tensor = tl.where(begins <= flat, higher, tensor)
    base = tl.load(addresses_T + tensor).to(tl.pointer_type(tl.float32))
    address = base + (flat - tl.load(offsets_E + tensor))
    sums = tl.load(address, mask=inside, other=0.0) + tl.load(values_K + k, mask=inside, other=0.0)
    tl.store(address, sums, mask=inside)


@triton.jit
def blend(
    table_C4,
    addresses_T,
    momenta,
    fault,
    momentum,
    ahead,
    NESTEROV: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Momenta u = m u + g; with NESTEROV u = m (u + g), and u + g is `ahead`.

    Launch it without fused multiplication and addition, which round once where torch does twice.
    """
    tensor, start, size, place = _row(table_C4)
    if tl.load(fault) == 0:
        gradient = _read(_pointer(addresses_T, tensor, ALIGNED), start, size, CHUNK)
        u = _read(momenta + place, start, size, CHUNK)
        if NESTEROV:
            u = (u + gradient) * momentum
            _write(ahead + place, start, size, u + gradient, CHUNK)
        else:
            u = u * momentum + gradient
        _write(momenta + place, start, size, u, CHUNK)
