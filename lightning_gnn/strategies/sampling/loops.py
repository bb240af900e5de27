"""Loops of sampling, compiled by numba at first use and cached on disk.

Random numbers are counter-based: a target's numbers depend on (seed, key of the target), not on threads or on other draws.
Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. The mixing function is from splitmix64 (Steele et
al., OOPSLA 2014).

R rows (targets) and E slots of a CSR matrix of in-edges, T targets, S edges drawn.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,call-arg"

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba.core import cgutils, types
from numba.extending import intrinsic, overload

from lightning_gnn.kernels.loops import copy, loop, prefetch

AHEAD = 64
"""Prefetch distance in targets, slots or ids: the fastest of 8, 16, 32 and 64 in each loop."""

FEW = 32
"""Maximum number of draws for which a linear search is faster than a table."""

FIND, ADD, APPEND = 0, 1, 2
"""Modes of numbering: unknown ids get -1; unknown ids get the next number; every id gets the next number, even if it has one."""


@intrinsic
def pointer(typing_context: Any, address: Any) -> Any:
    """Returns an address as a pointer, for `numba.carray`; its memory must outlive the loop."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@numba.njit(inline="always")
def _mix(word):
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


@numba.njit(inline="always")
def _stream(seed, key):
    """Returns the state before the first random number of a target."""
    return _mix(np.uint64(seed) ^ _mix(np.uint64(key) + np.uint64(0x9E3779B97F4A7C15)))


@numba.njit(inline="always")
def _uniform(state, draw):
    """Returns the random number of a state and a count, at least 0 and below 1."""
    word = _mix(state + np.uint64(draw + 1) * np.uint64(0x9E3779B97F4A7C15))
    # 53 bits: float64 is uniform at this resolution, and the error of a neighbor's probability is below degree / 2^53.
    return np.int64(word >> np.uint64(11)) * (1.0 / (1 << 53))


@numba.njit
def _count(degree, fanout, replace):
    """Returns the number of edges drawn from `degree` edges."""
    return fanout if fanout >= 0 and (degree > fanout or (replace and degree > 0)) else degree


@loop
def offsets_of_all(indptr, targets, fanout, replace, offsets):
    """Write the range of each target's edges, ``offsets[t]`` to ``offsets[t + 1]``; int64 ``[T + 1]``."""
    offsets[0] = 0
    last = len(targets) - 1
    for t in range(len(targets)):
        prefetch(indptr, targets[min(t + AHEAD, last)])
        row = targets[t]
        offsets[t + 1] = offsets[t] + _count(indptr[row + 1] - indptr[row], fanout, replace)


@numba.njit(inline="always")
def _moment(slot, indices, time, per_source):
    """Returns the time of an edge: its own, or its source's."""
    return time[indices[slot]] if per_source else time[slot]


@numba.njit(inline="always")
def _is_allowed(slot, indices, weight, time, per_source, latest):
    """Returns whether an edge may be drawn, by its weight and its time, if there are any."""
    in_time = len(time) == 0 or _moment(slot, indices, time, per_source) <= latest
    return in_time and (len(weight) == 0 or weight[slot] > 0)


@loop
def offsets_of_allowed(indptr, indices, weight, time, per_source, until, targets, fanout, offsets):
    """Write offsets as `offsets_of_all`, for edges with weights ``[E]`` above 0 and times up to their target's limit ``[T]``.

    `time` is per edge ``[E]``, or with `per_source` per column ``[C]``.
    """
    offsets[0] = 0
    for t in range(len(targets)):
        row, found = targets[t], 0
        limit = until[t] if len(until) > 0 else 0
        for slot in range(indptr[row], indptr[row + 1]):
            found += _is_allowed(slot, indices, weight, time, per_source, limit)
        offsets[t + 1] = offsets[t] + (found if fanout < 0 else min(found, fanout))


@loop
def random_numbers(indptr, targets, keys, seed, offsets, slots, out, low, high):
    """Write the random number of each of the ``slots [S]`` of targets `low` to `high`, from 0 up to 1, as used by `draw_best`."""
    for t in range(low, high):
        state, start = _stream(seed, keys[t]), indptr[targets[t]]
        for s in range(offsets[t], offsets[t + 1]):
            out[s] = _uniform(state, slots[s] - start)


@numba.njit
def _draw(state, start, degree, count, replace, slots, begin, table, owner, t):
    """Write `count` random slots of a target's `degree` slots, from `start` on; for `table` and `owner` see `draw_uniform`."""
    if replace:
        for i in range(count):
            slots[begin + i] = start + np.int64(_uniform(state, i) * degree)
    elif count <= FEW:
        for i in range(count):
            newest = start + degree - count + i
            slot = start + np.int64(_uniform(state, i) * (degree - count + i + 1))
            for before in range(begin, begin + i):
                if slots[before] == slot:
                    slot = newest
                    break
            slots[begin + i] = slot
    else:
        size = len(table)
        for i in range(count):
            slot = np.int64(_uniform(state, i) * (degree - count + i + 1))
            place = slot & (size - 1)
            while owner[place] == t and table[place] != slot:
                place = (place + 1) & (size - 1)
            if owner[place] == t:
                slot = degree - count + i
                place = slot & (size - 1)
                while owner[place] == t:
                    place = (place + 1) & (size - 1)
            owner[place], table[place] = t, slot
            slots[begin + i] = start + slot


@loop
def draw_uniform(indptr, targets, keys, seed, offsets, replace, slots, low, high):
    """Write slots of targets `low` to `high`: all of them, or random ones up to the size in `offsets`.

    Without replacement: Floyd's algorithm (Bentley and Floyd, CACM 30(9), 1987), with one draw per slot kept.
    """
    # Table of the slots drawn for one target; entries are marked with the target's number.
    widest = 0
    for t in range(low, high):
        widest = max(widest, offsets[t + 1] - offsets[t])
    size = 1
    while size < 2 * widest and widest > FEW:
        size *= 2
    table, owner = np.empty(size, np.int64), np.full(size, -1, np.int64)
    last = high - 1
    for t in range(low, high):
        ahead = targets[min(t + AHEAD, last)]
        prefetch(indptr, ahead)
        begin, count = offsets[t], offsets[t + 1] - offsets[t]
        if count == 0:
            continue
        row = targets[t]
        start = indptr[row]
        degree = indptr[row + 1] - start
        if count == degree and not replace:
            for i in range(count):
                slots[begin + i] = start + i
            continue
        state = _stream(seed, keys[t] if len(keys) > 0 else t)
        _draw(state, start, degree, count, replace, slots, begin, table, owner, t)


@loop
def draw_best(
    indptr, indices, weight, time, per_source, until, latest, source_keys, targets, keys, seed, offsets, slots, low, high
):
    """Write the allowed slots with the smallest scores; if all slots of a target are allowed and fit, in their order.

    `weight` ``[E]``, `time` (see `offsets_of_allowed`) and `until` ``[T]`` may be empty. Scores: with `latest`, the negative
    time. Otherwise an exponential random number divided by the weight. This draws without replacement with probabilities
    proportional to weights (Efraimidis and Spirakis, Information Processing Letters 97(5), 2006). The number belongs to the edge,
    or, with `source_keys` ``[C]``, to its source: the first edge from a source has the first number, the second the second.
    """
    widest, most, by_source = 0, 0, len(source_keys) > 0
    for t in range(low, high):
        widest = max(widest, offsets[t + 1] - offsets[t])
        most = max(most, indptr[targets[t] + 1] - indptr[targets[t]])
    scores = np.empty(widest, np.float64)
    # Table of the number of edges of one target from each source, by the source's state; entries are marked with the target's
    # number.
    size = 1
    while size < 2 * most and by_source:
        size *= 2
    owner, states, times = np.full(size, -1, np.int64), np.empty(size, np.uint64), np.empty(size, np.int64)
    for t in range(low, high):
        begin, count = offsets[t], offsets[t + 1] - offsets[t]
        if count == 0:
            continue
        row = targets[t]
        start, end = indptr[row], indptr[row + 1]
        if count == end - start:
            for i in range(count):
                slots[begin + i] = start + i
            continue
        state = _stream(seed, keys[t] if len(keys) > 0 else t)
        limit = until[t] if len(until) > 0 else 0
        found, worst = 0, 0
        for slot in range(start, end):
            if not _is_allowed(slot, indices, weight, time, per_source, limit):
                continue
            if latest:
                score = -np.float64(_moment(slot, indices, time, per_source))
            else:
                draw = slot - start
                if by_source:
                    state = _stream(seed, source_keys[indices[slot]])
                    place = np.int64(state & np.uint64(size - 1))
                    while owner[place] == t and states[place] != state:
                        place = (place + 1) & (size - 1)
                    draw = times[place] + 1 if owner[place] == t else 0
                    owner[place], states[place], times[place] = t, state, draw
                score = -np.log(1 - _uniform(state, draw))
                if len(weight) > 0:
                    score /= weight[slot]
            if found < count:
                scores[found], slots[begin + found] = score, slot
                worst = found if score >= scores[worst] else worst  # ties: the last slot
                found += 1
            elif score < scores[worst]:
                scores[worst], slots[begin + worst] = score, slot
                for i in range(count):
                    later = slots[begin + i] > slots[begin + worst]
                    if scores[i] > scores[worst] or (scores[i] == scores[worst] and later):
                        worst = i


@loop
def take(indices, edge, listed, slots, sources, edges, low, high):
    """Write ``sources[s] = indices[slots[s]]``, and ``edges[s] = edge[slots[s]]`` with `listed`, else the slot."""
    last = high - 1
    for s in range(low, high):
        ahead = slots[min(s + AHEAD, last)]
        prefetch(indices, ahead)
        if listed:
            prefetch(edge, ahead)
        slot = slots[s]
        sources[s] = indices[slot]
        edges[s] = edge[slot] if listed else slot


@loop
def number_in_array(ids, numbers, base, known_ids, count, out, mode):
    """Number ids, ``[n]``, by first occurrence; returns the count of numbers.

    Args:
        numbers: int32 ``[num_ids]``; values below `base` belong to an earlier batch.
        known_ids: ids by number, written from `count` on.
        mode: see `FIND`.
    """
    last = len(ids) - 1
    for i in range(len(ids)):
        prefetch(numbers, ids[min(i + AHEAD, last)])
        number = np.int64(numbers[ids[i]]) - base
        new = number < 0
        if new and mode != FIND:
            number = count
            numbers[ids[i]] = base + count
        if mode == APPEND or (new and mode == ADD):
            known_ids[count] = ids[i]
            count += 1
        out[i] = max(number, -1)
    return count


@loop
def number_in_table(ids, table, base, known_ids, count, out, mode):
    """Number ids as `number_in_array` does, by open addressing; table: ids and numbers, int64 ``[power of two, 2]``."""
    last, wrap = len(ids) - 1, len(table) - 1
    for i in range(len(ids)):
        prefetch(table, np.int64(_mix(np.uint64(ids[min(i + AHEAD, last)])) & np.uint64(wrap)))
        place = np.int64(_mix(np.uint64(ids[i])) & np.uint64(wrap))
        while table[place, 1] >= base and table[place, 0] != ids[i]:
            place = (place + 1) & wrap
        number = table[place, 1] - base
        new = number < 0
        if new and mode != FIND:
            number = count
            table[place, 0], table[place, 1] = ids[i], base + count
        if mode == APPEND or (new and mode == ADD):
            known_ids[count] = ids[i]
            count += 1
        out[i] = max(number, -1)
    return count


def _number(ids, memory, base, known_ids, count):
    """Number ids in place, by `number_in_array` or `number_in_table`; returns the count of numbers."""


@overload(_number)
def _number_compiled(ids, memory, base, known_ids, count):
    if memory.ndim == 1:
        return lambda ids, memory, base, known_ids, count: number_in_array(ids, memory, base, known_ids, count, ids, ADD)
    return lambda ids, memory, base, known_ids, count: number_in_table(ids, memory, base, known_ids, count, ids, ADD)


@numba.njit
def _number_at(address, place):
    return numba.carray(pointer(address), place + 1, np.int64)[place]


@numba.njit
def _slots_of(parts, offsets, part, node):
    """Returns the part of a node, which is searched from a guess, its first slot, and the number of its slots."""
    while not offsets[part] <= node < offsets[part + 1]:
        part = part + 1 if node >= offsets[part] else 0
    start = _number_at(parts[part, 0], node - parts[part, 4])
    return part, start, _number_at(parts[part, 0], node - parts[part, 4] + 1) - start


@loop
def sample_hops(parts, offsets, like, fanouts, seed, replace, memory, base, known_ids, count, row, col, edge, sizes):
    """Sample the neighborhood of the first `count` of `known_ids` over all hops, with the draws of `draw_uniform`.

    Args:
        parts: addresses and numbers of each part, int64 ``[P, 8]``. Addresses: indptr, indices, halo ids, and edge ids, or 0 if
            slots are in their order. Numbers: first row, difference of ids and columns of local sources, number of local columns,
            first edge.
        offsets: first node of each part and the end, ``[P + 1]``.
        like: array with the dtype of the indices of parts.
        fanouts: edges per target, by hop.
        memory, base, known_ids: see `number_in_array` and `number_in_table`.
        row, col, edge: numbers of the sources and targets, and ids, of the sampled edges, written from 0 on, int64.
        sizes: output: numbers of nodes and edges after each hop, int64 ``[hops, 2]``.

    Returns:
        The number of nodes; or, if `row` is too short, minus the number of edges up to the current hop.
    """
    first, edges, part = 0, 0, 0
    for hop in range(len(fanouts)):
        fanout, before = fanouts[hop], edges
        for t in range(first, count):
            ahead = known_ids[min(t + AHEAD, count - 1)]
            if offsets[part] <= ahead < offsets[part + 1]:
                place = ahead - parts[part, 4]
                prefetch(numba.carray(pointer(parts[part, 0]), place + 1, np.int64), place)
            part, _, degree = _slots_of(parts, offsets, part, known_ids[t])
            edges += _count(degree, fanout, replace)
        if edges > len(row):
            return -edges
        size, edges = 1, before
        while size < 2 * fanout and fanout > FEW:
            size *= 2
        table, owner = np.empty(size, np.int64), np.full(size, -1, np.int64)
        for t in range(first, count):
            there, place, _ = _slots_of(parts, offsets, part, known_ids[min(t + 8, count - 1)])
            prefetch(numba.carray(pointer(parts[there, 1]), place + 1, like.dtype), place)
            node = known_ids[t]
            part, start, degree = _slots_of(parts, offsets, part, node)
            number = _count(degree, fanout, replace)
            if number < degree or (replace and fanout >= 0):
                _draw(_stream(seed, node), start, degree, number, replace, edge, edges, table, owner, t)
            else:
                for i in range(number):
                    edge[edges + i] = start + i
            indices = numba.carray(pointer(parts[part, 1]), start + degree, like.dtype)
            shift, owned = parts[part, 5], parts[part, 6]
            for slot in range(edges, edges + number):
                source = np.int64(indices[edge[slot]])
                row[slot] = source + shift if source < owned else _number_at(parts[part, 2], source - owned)
                edge[slot] = parts[part, 7] + (_number_at(parts[part, 3], edge[slot]) if parts[part, 3] else edge[slot])
                col[slot] = t
            edges += number
        first = count
        count = _number(row[before:edges], memory, base, known_ids, count)
        sizes[hop, 0], sizes[hop, 1] = count, edges
    return count


@loop
def gather(table):
    """Copy rows of several tensors; table int64 ``[A, 5]``: addresses of ids, source and result, numbers of ids and of bytes."""
    for a in range(len(table)):
        width = table[a, 4]
        for i in range(table[a, 3]):
            ends = table[a, 1] + _number_at(table[a, 0], i) * width, table[a, 2] + i * width
            copy(numba.carray(pointer(ends[0]), width, np.uint8), numba.carray(pointer(ends[1]), width, np.uint8))


@loop
def walk(indptr, indices, nodes, seed, out, low, high):
    """Walk to random in-neighbors; T walks, out ``[T, steps + 1]``. A walk stays at a node without in-neighbors."""
    for t in range(low, high):
        node = nodes[t]
        out[t, 0] = node
        state = _stream(seed, t)
        for step in range(1, out.shape[1]):
            start = indptr[node]
            degree = indptr[node + 1] - start
            if degree > 0:
                node = np.int64(indices[start + np.int64(_uniform(state, step - 1) * degree)])
            out[t, step] = node
