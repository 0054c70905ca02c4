"""Which calls of attention a ring makes with the keys of one rank: as few as see the same.

What a rank holds lies in the order of positions, in zigzag too. So under a band each row sees one range of the keys of
another rank, as they lie. With the row n at position p

    low(n) = keys before p + offset - left        high(n) = keys before p + offset + right + 1

and one call over several segments is the same where both are those of a band of its own,

    low(n) = n - left'        high(n) = n + right' + 1        cut to 0 and the number of keys

All four are straight between corners, so they are compared there. In zigzag with lengths alike a causal ring has one
call a step: causal over all own tokens; all rows with another rank's head; or the tail's rows with all of its keys.

What tells rows or keys apart that are seen alike (a mask, a bias, dropout, slopes) needs them side by side in the
sequence, too.

Called by ring.py, and by allgather.py where a row's keys come in several calls; packed_ring.py makes its own pairs.
Invariant: every row sees each of its keys in one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from torch import Tensor

from flash_ext.distributed import slopes
from flash_ext.distributed.layout import Band, Part, Segment
from flash_ext.distributed.local import DROPOUT_STEP, Call

Segments = tuple[Segment, ...]  # side by side as rows, in the order of positions


@dataclass(frozen=True)
class Pair:
    """A call on rows of this rank and rows of another rank's keys.

    ``diagonal``: of the first row less the first key, for slopes, or of packed sequences ``between``; ``hidden``: rows
    that see nothing in truth; ``alone``: its rows see no other keys; ``first``: no earlier call has them.
    """

    call: Call
    read: slice
    diagonal: int = 0
    between: slopes.Between | None = None
    hidden: Tensor | None = None
    alone: bool = False
    first: bool = False

    def is_whole(self, sinks: Tensor | None) -> bool:
        """Whether its lse is that of the rows."""
        return self.alone and sinks is None


@dataclass(frozen=True)
class Matters:
    """What tells keys apart that a row sees (a mask, a bias, dropout), and rows that see the same keys (dropout), by
    their position; and what counts distances (slopes)."""

    keys: bool = False
    rows: bool = False
    distance: bool = False


def pairs_of(band: Band, rows: Sequence[Segment], keys: Sequence[Segment], matters: Matters) -> list[Pair]:
    """What the rows of one rank see of the keys of one rank."""
    rows, keys = _runs(rows), _runs(keys)
    if not rows or not keys or (band.left is not None and band.right is not None and band.left + band.right < 0):
        return []
    if matters.distance or matters.rows:
        step = DROPOUT_STEP if matters.rows else 1
        return [
            _pair_of_part(band, of_rows, of_keys, part)
            for of_rows, of_keys in product(rows, keys)
            for part in slopes.parts_of(band, of_rows, of_keys, matters.distance, step)
        ]
    of_rows, of_keys = _ways(rows), _ways(keys, apart=matters.keys)
    best: list[Pair] | None = None
    for key_way, row_way in product(of_keys, of_rows):
        found = [_one_call(band, *both) for both in product(row_way, key_way)]
        pairs = [pair for seen in found if seen is not None for pair in seen]
        if None not in found and (best is None or len(pairs) < len(best)):
            best = pairs
        if best is not None and len(best) <= 1:
            break
    assert best is not None, "a segment sees a band of another one"
    return best


def in_order(pairs: Sequence[Pair]) -> list[Pair]:
    """All pairs of a rank in the order of their calls, with what they know of each other."""
    found = []
    for i, pair in enumerate(pairs):
        rows = pair.call.rows
        others = [
            j for j, other in enumerate(pairs)
            if j != i and rows.start < other.call.rows.stop and other.call.rows.start < rows.stop
        ]  # fmt: skip
        found.append(replace(pair, alone=not others, first=not others or min(others) > i))
    return found


def _ways(segments: Segments, apart: bool = False) -> list[list[Segments]]:
    each = [(segment,) for segment in segments]
    return [each] if apart or len(segments) == 1 else [[segments], each]


def _runs(segments: Sequence[Segment]) -> Segments:
    """Without empty ones; those that follow each other in the sequence are one."""
    found: list[Segment] = []
    for segment in sorted(segments, key=lambda segment: segment.row):
        if found and found[-1].end == segment.start:
            last = found.pop()
            segment = Segment(last.start, last.row, last.size + segment.size)
        if segment.size:
            found.append(segment)
    return tuple(found)


def _before(segments: Segments, position: int) -> int:
    return sum(min(max(position - segment.start, 0), segment.size) for segment in segments)


def _position(segments: Segments, row: int) -> int:
    for segment in segments:
        if row < segment.size:
            return segment.start + row
        row -= segment.size
    raise AssertionError("the row is behind the last one")


def _one_call(band: Band, rows: Segments, keys: Segments) -> list[Pair] | None:
    """The call that sees what all these rows see of all these keys; none where that is nothing; None: there is none."""
    count = sum(segment.size for segment in keys)
    shift = band.offset

    def low(position: int) -> int:
        return 0 if band.left is None else _before(keys, position + shift - band.left)

    def high(position: int) -> int:
        return count if band.right is None else _before(keys, position + shift + band.right + 1)

    # Rows in front of what sees the first key, and behind what sees the last one, see nothing.
    first = 0 if band.right is None else _before(rows, keys[0].start - shift - band.right)
    last = sum(segment.size for segment in rows)
    last = last if band.left is None else min(last, _before(rows, keys[-1].end - shift + band.left))
    if first >= last:
        return []
    front, back = _position(rows, first), _position(rows, last - 1)
    key0, key1 = low(front), high(back)
    if key0 >= key1:
        return []
    left = None if low(back) == key0 else last - first - 1 - (low(back) - key0)
    right = None if high(front) == key1 else high(front) - key0 - 1
    if min(left or 0, right or 0) < 0:
        return None
    size = key1 - key0
    corners = [] if left is None else [first + left, first + left + size]
    corners += [] if right is None else [first - right - 1, first - right - 1 + size]
    row = 0
    for segment in rows:
        near, far = max(first, row), min(last, row + segment.size) - 1
        edges = [edge - shift - segment.start + row for of_keys in keys for edge in (of_keys.start, of_keys.end)]
        places = [*corners, near, far]
        places += [] if band.left is None else [edge + band.left for edge in edges]
        places += [] if band.right is None else [edge - band.right - 1 for edge in edges]
        for place in places:
            if near <= place <= far:
                position = segment.start + place - row
                lowest = 0 if left is None else min(max(place - first - left, 0), size)
                highest = size if right is None else min(max(place - first + right + 1, 0), size)
                if (low(position) - key0, high(position) - key0) != (lowest, highest):
                    return None
        row += segment.size
    return [_pair(rows[0].row + first, keys[0].row + key0, Part(
        slice(front, front + last - first), slice(keys[0].start + key0, keys[0].start + key1), left, right
    ), 0)]  # fmt: skip


def _pair_of_part(band: Band, rows: Segment, keys: Segment, part: Part) -> Pair:
    row, key = (of.row + seen.start - of.start for of, seen in ((rows, part.queries), (keys, part.keys)))
    return _pair(row, key, part, slopes.diagonal(band, part))


def _pair(row: int, key: int, part: Part, diagonal: int) -> Pair:
    """``part``: of several segments its positions are those of the first one, and go on; nothing asks for them then."""
    sizes = [positions.stop - positions.start for positions in (part.queries, part.keys)]
    call = Call(slice(row, row + sizes[0]), part.keys, part.queries, part.sides)
    return Pair(call, slice(key, key + sizes[1]), diagonal)
