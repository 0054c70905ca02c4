"""Which tokens of a sequence a rank holds, and which of them see each other.

A sequence is cut into segments, one a rank ("contiguous") or two ("zigzag"):

    contiguous, 3 ranks    | 0 | 1 | 2 |
    zigzag, 3 ranks        | 0 | 1 | 2 | 2 | 1 | 0 |      so that under a causal band all ranks have the same work

The lengths that the ranks hold decide: of n tokens in zigzag the first n - n // 2 are the head, the others the tail.

Called by the methods of context parallel. Invariant: the segments of all ranks, in order of position, are the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

from flash_ext.errors import AttentionError

BALANCES = ("contiguous", "zigzag")


@dataclass(frozen=True)
class Segment:
    """``size`` tokens from position ``start`` of the sequence on, which a rank holds from its row ``row`` on."""

    start: int
    row: int
    size: int

    @property
    def end(self) -> int:
        return self.start + self.size

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + self.size)


@dataclass(frozen=True)
class Layout:
    """The segments of every rank, and their length together."""

    ranks: tuple[tuple[Segment, ...], ...]
    length: int

    def size(self, rank: int) -> int:
        return sum(segment.size for segment in self.ranks[rank])


def check_balance(balance: str) -> None:
    if balance not in BALANCES:
        raise AttentionError(f'balance is {balance!r}; it must be "contiguous" or "zigzag"')


def layout_of(lengths: tuple[int, ...], balance: str) -> Layout:
    """``lengths``: how many tokens each rank holds."""
    if balance == "contiguous":
        segments, start = [], 0
        for size in lengths:
            segments.append((Segment(start, 0, size),))
            start += size
        return Layout(tuple(segments), start)
    heads = [size - size // 2 for size in lengths]
    starts, start = [], 0
    for head in heads:
        starts.append(start)
        start += head
    tails = {}
    for rank in reversed(range(len(lengths))):
        tails[rank] = start
        start += lengths[rank] // 2
    ranks = tuple(
        (Segment(starts[rank], 0, heads[rank]), Segment(tails[rank], heads[rank], lengths[rank] // 2))
        for rank in range(len(lengths))
    )
    return Layout(ranks, start)


def even_layout(length: int, ranks: int, balance: str) -> Layout:
    """What ``shard_sequence`` deals: the first ``length % ranks`` ranks hold one token more than the others."""
    return layout_of(tuple(length // ranks + (rank < length % ranks) for rank in range(ranks)), balance)


def outer_layout(layout: Layout, outer: int, inner: int) -> Layout:
    """The layout over the outer dimension of a mesh (outer, inner), where each row of ranks holds its tokens as one."""
    ranks = []
    for first in range(0, outer * inner, inner):
        members = layout.ranks[first : first + inner]
        row, segments = 0, []
        for part in range(len(members[0])):
            size = sum(member[part].size for member in members)
            start = min(member[part].start for member in members)
            segments.append(Segment(start, row, size))
            row += size
        ranks.append(tuple(segments))
    return Layout(tuple(ranks), layout.length)


def within(layout: Layout, outer_rank: int, inner: int) -> Layout:
    """The layout of one row of ranks of that mesh among themselves, with positions in their common tokens."""
    members = layout.ranks[outer_rank * inner : (outer_rank + 1) * inner]
    return layout_of(tuple(sum(segment.size for segment in member) for member in members), _balance(layout))


def _balance(layout: Layout) -> str:
    return "zigzag" if len(layout.ranks[0]) == 2 else "contiguous"


@dataclass(frozen=True)
class Band:
    """Key j is seen by query i when i + offset - left <= j <= i + offset + right; None is unbounded."""

    left: int | None
    right: int | None
    offset: int

    @classmethod
    def of(
        cls, causal: bool, window: tuple[int | None, int | None], bottom_right: bool, queries: int, keys: int
    ) -> Band:
        left, right = window
        if causal:
            right = 0 if right is None else min(right, 0)
        return cls(left, right, keys - queries if bottom_right else 0)

    def share(self, keys: int) -> float:
        """Which part of its keys a row sees, about."""
        return sum(0.5 if side is None else min(0.5, side / max(keys, 1)) for side in (self.left, self.right))

    def count(self, query: float, keys: int) -> float:
        """How many of the keys a row sees; of a segment by its middle, about."""
        first = 0 if self.left is None else max(0, query + self.offset - self.left)
        end = keys if self.right is None else min(keys, query + self.offset + self.right + 1)
        return max(0, end - first)


def busiest(band: Band, queries: Layout, keys: int) -> float:
    """The largest share of the pairs that are seen which one rank's rows have, of the mean, about."""
    work = [sum(of.size * band.count(of.start + (of.size - 1) / 2, keys) for of in held) for held in queries.ranks]
    return max(work) * len(work) / sum(work) if any(work) else 1.0


@dataclass(frozen=True)
class Part:
    """Rows and keys of one call, and its band with the first row at the first key, or with ``bottom_right`` the last
    row at the last key. Outside it nothing is seen."""

    queries: slice  # positions in the sequence
    keys: slice
    left: int | None
    right: int | None
    bottom_right: bool = False

    @property
    def sides(self) -> dict[str, int | bool | None]:
        """For the operator."""
        return {"window_left": self.left, "window_right": self.right, "bottom_right": self.bottom_right}


def visible(band: Band, queries: Segment, keys: Segment, step: int = 1) -> Part | None:
    """The part of queries x keys that is not hidden as a whole, with sides that are not negative; None: all is hidden.

    With d = queries.start + offset - keys.start, row a sees keys a + d - left to a + d + right. Rows and keys at the
    edges that see nothing are cut off, after which -right <= d <= left. ``step``: the keys begin at a multiple of it,
    if their segment does, with some that nothing sees; the band is told from the other corner then.
    """
    left, right = band.left, band.right
    rows, cols = queries.size, keys.size
    d = queries.start + band.offset - keys.start
    first_key = 0 if left is None else max(0, d - left)
    last_key = cols if right is None else min(cols, rows + d + right)
    first_row = 0 if right is None else max(0, -d - right)
    last_row = rows if left is None else min(rows, cols - d + left)
    rows, cols = last_row - first_row, last_key - first_key
    if rows <= 0 or cols <= 0 or (left is not None and right is not None and left + right < 0):
        return None
    unseen = min((keys.start + first_key) % step, first_key)
    first_key, cols = first_key - unseen, cols + unseen
    d += first_row - first_key
    left = None if left is None or left - d >= rows - 1 else left - d
    right = None if right is None or right + d >= cols - 1 else right + d
    query0, key0 = queries.start + first_row, keys.start + first_key
    from_corner = left is not None and left < 0
    if from_corner:
        left, right = left + cols - rows, None if right is None else right - (cols - rows)
    return Part(slice(query0, query0 + rows), slice(key0, key0 + cols), left, right, from_corner)
