"""Tiles of a plan: which of them the band keeps, and which block computes which, in what order.

The band, the order of tiles and the cut of the CPU are those of csrc/core/band.h, csrc/core/tile_schedule.h and
csrc/kernels/cpu/work.h, from the same numbers. Called by explain_page.py. Invariant: a tile is skipped exactly when the
band hides all of its pairs, and kept when it hides none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from flash_ext.explain import Plan

Pass = Literal["forward", "backward"]
KEPT, BOUNDARY, SKIPPED = "k", "b", "s"
MOST_CELLS, MOST_STRIPS, MOST_ROWS = 64, 256, 1 << 18
_FAR = 1 << 40


@dataclass(frozen=True)
class Call:
    """What was asked for. Of packed sequences ``batch`` is their number, and lengths are those of the longest.

    ``window`` has two numbers of keys, None where a side is open; ``added``: what else changes scores.
    """

    batch: int
    heads_q: int
    heads_k: int
    heads_v: int
    len_q: int
    len_k: int
    head_dim: int
    head_dim_v: int
    dtype: str
    causal: bool
    window: tuple[int | None, int | None]
    align: str
    packed: bool
    added: tuple[str, ...]
    batch_invariant: bool

    @property
    def folds(self) -> bool:
        """Whether forward takes one query of grouped heads for one head with a query for each (core/fold_heads.h)."""
        grouped = self.len_q == 1 and self.heads_q > self.heads_k == self.heads_v
        own = self.packed or self.batch_invariant or {"ALiBi", "dropout"} & set(self.added)
        return grouped and not own and bool(Band.of(self).keys(range(1), self.len_k))


@dataclass(frozen=True)
class Band:
    """Key j is seen by query i exactly when i + lower <= j <= i + upper."""

    lower: int = -_FAR
    upper: int = _FAR

    @staticmethod
    def of(call: Call) -> Band:
        offset = call.len_k - call.len_q if call.align == "bottom_right" else 0
        left, right = call.window
        lower = -_FAR if left is None else max(offset - left, -_FAR)
        upper = _FAR if right is None else min(offset + right, _FAR)
        return Band(lower, min(upper, offset) if call.causal else upper)

    def keys(self, queries: range, count: int) -> range:
        """Of `count` keys those that at least one of the queries sees."""
        if not queries:
            return range(0)
        first = min(max(queries.start + self.lower, 0), count)
        return range(first, max(min(queries.stop + self.upper, count), first))

    def queries(self, keys: range, count: int) -> range:
        """Of `count` queries those that see at least one of the keys."""
        return Band(-self.upper, -self.lower).keys(keys, count)

    def keeps_all(self, queries: range, keys: range) -> bool:
        return keys[-1] - queries[0] <= self.upper and keys[0] - queries[-1] >= self.lower

    def kind(self, queries: range, keys: range) -> str:
        if self.keeps_all(queries, keys):
            return KEPT
        seen = self.keys(queries, keys.stop)
        return BOUNDARY if seen and seen.stop > keys.start else SKIPPED


@dataclass(frozen=True)
class Counts:
    kept: int
    boundary: int
    skipped: int


@dataclass(frozen=True)
class Cells:
    """Tiles as they are drawn: ``rows`` of letters, each of which stands for ``step_m`` x ``step_n`` tiles.

    A cell of several tiles is kept or skipped where all of them are, and a boundary otherwise.
    """

    step_m: int
    step_n: int
    rows: tuple[str, ...]


@dataclass(frozen=True)
class Matrix:
    """The scores of one head in tiles of block_m queries and block_n keys."""

    len_q: int
    len_k: int
    block_m: int
    block_n: int
    band: Band

    @property
    def m_blocks(self) -> int:
        return -(-self.len_q // self.block_m)

    @property
    def n_blocks(self) -> int:
        return -(-self.len_k // self.block_n)

    def queries(self, block: int, count: int = 1) -> range:
        return range(block * self.block_m, min((block + count) * self.block_m, self.len_q))

    def keys(self, block: int, count: int = 1) -> range:
        return range(block * self.block_n, min((block + count) * self.block_n, self.len_k))

    def tiles_of_row(self, block: int) -> range:
        """Tiles of keys that the queries of this tile see."""
        seen = self.band.keys(self.queries(block), self.len_k)
        return range(seen.start // self.block_n, -(-seen.stop // self.block_n)) if seen else range(0)

    def tiles_of_column(self, block: int) -> range:
        """Tiles of queries that see the keys of this tile."""
        seen = self.band.queries(self.keys(block), self.len_q)
        return range(seen.start // self.block_m, -(-seen.stop // self.block_m)) if seen else range(0)

    def counts(self) -> Counts | None:
        """Tiles by kind; None where there are too many rows to go through."""
        if self.m_blocks > MOST_ROWS:
            return None
        kept = seen = 0
        for block in range(self.m_blocks):
            queries, visited = self.queries(block), len(self.tiles_of_row(block))
            first = max(-(-(queries[-1] + self.band.lower) // self.block_n), 0)
            end = queries[0] + self.band.upper + 1
            last = self.n_blocks if end >= self.len_k else end // self.block_n
            kept += min(max(last - first, 0), visited)
            seen += visited
        return Counts(kept, seen - kept, self.m_blocks * self.n_blocks - seen)

    def cells(self) -> Cells:
        """At most MOST_CELLS x MOST_CELLS of them."""
        step_m, step_n = -(-self.m_blocks // MOST_CELLS), -(-self.n_blocks // MOST_CELLS)
        columns = [self.keys(n, step_n) for n in range(0, self.n_blocks, step_n)]
        rows = [self.queries(m, step_m) for m in range(0, self.m_blocks, step_m)]
        return Cells(step_m, step_n, tuple("".join(self.band.kind(r, c) for c in columns) for r in rows))


def matrix_of(call: Call, plan: Plan, pass_name: Pass) -> Matrix | None:
    """The scores as the kernel of the pass sees them, in its tiles; without a kernel the band alone, in tiles of our
    own. None where there are no scores."""
    len_q, len_k, band = call.len_q, call.len_k, Band.of(call)
    if pass_name == "forward" and call.folds:
        len_q, len_k, band = call.heads_q // call.heads_k, len(band.keys(range(1), len_k)), Band()
    if len_q <= 0 or len_k <= 0:
        return None
    if not plan.block_m or not plan.block_n:
        return Matrix(len_q, len_k, -(-len_q // MOST_CELLS), -(-len_k // MOST_CELLS), band)
    return Matrix(len_q, len_k, plan.block_m, plan.block_n, band)


@dataclass(frozen=True)
class Strip:
    """What a block (on the CPU: an item of a thread) computes of a head, in elements; ``number``: its place in the
    order of those of the head, from 1; ``tiles``: those that it goes through."""

    number: int
    queries: tuple[int, int]
    keys: tuple[int, int]
    tiles: int


@dataclass(frozen=True)
class Order:
    """How blocks share the scores of a head: ``by`` queries or keys; ``count`` strips, of which at most MOST_STRIPS
    are listed; ``last_first``: from the last queries or keys to the first; ``chunks``: of a group of heads, on the
    CPU."""

    by: Literal["queries", "keys"]
    count: int
    last_first: bool
    strips: tuple[Strip, ...]
    chunks: int = 0


def order_of(call: Call, plan: Plan, pass_name: Pass, matrix: Matrix) -> Order | None:
    """None where the plan does not say it: no kernel, or a list that is made on the device."""
    if not plan.block_m:
        return None
    if plan.backend == "cpu":
        return _order_of_cpu(call, plan, pass_name, matrix)
    if plan.backend not in ("sm80", "sm90") or call.packed:
        return None
    if pass_name == "forward" or plan.schedule.startswith("a tile of queries"):
        return _by_queries(plan, matrix)
    return _by_keys(plan, matrix)


def _sample(count: int) -> Iterator[int]:
    shown = min(count, MOST_STRIPS)
    return (i * count // shown for i in range(shown))


def _in_keys(matrix: Matrix, tiles: range) -> tuple[int, int]:
    return (tiles.start * matrix.block_n, min(tiles.stop * matrix.block_n, matrix.len_k)) if tiles else (0, 0)


def _in_queries(matrix: Matrix, tiles: range) -> tuple[int, int]:
    return (tiles.start * matrix.block_m, min(tiles.stop * matrix.block_m, matrix.len_q)) if tiles else (0, 0)


def _by_queries(plan: Plan, matrix: Matrix) -> Order:
    """As TileSchedule has them, and parts of a tile's keys one behind the other."""
    last, parts = matrix.m_blocks - 1, max(plan.splits, 1)

    def seen(block: int) -> int:
        return len(matrix.band.keys(matrix.queries(block), matrix.len_k))

    last_first = seen(last) > seen(0)
    strips = []
    for index in _sample(matrix.m_blocks * parts):
        block, part = index // parts, index % parts
        block = last - block if last_first else block
        tiles, of_part = matrix.tiles_of_row(block), plan.split_keys // matrix.block_n
        if parts > 1:
            first = min(tiles.start + part * of_part, tiles.stop)
            tiles = range(first, tiles.stop if part == parts - 1 else min(first + of_part, tiles.stop))
        queries = matrix.queries(block)
        strips.append(Strip(index + 1, (queries.start, queries.stop), _in_keys(matrix, tiles), len(tiles)))
    return Order("queries", matrix.m_blocks * parts, last_first, tuple(strips))


def _by_keys(plan: Plan, matrix: Matrix) -> Order:
    """From the first keys on, which a causal band lets most queries see; where dq has one order, those with the fewest
    queries first."""

    def seen(key: int) -> int:
        return len(matrix.band.queries(range(key, key + 1), matrix.len_q))

    last = matrix.n_blocks - 1
    last_first = plan.schedule.startswith("dq in order") and seen(0) > seen(matrix.len_k - 1)
    strips = []
    for index in _sample(matrix.n_blocks):
        block = last - index if last_first else index
        tiles, keys = matrix.tiles_of_column(block), matrix.keys(block)
        strips.append(Strip(index + 1, _in_queries(matrix, tiles), (keys.start, keys.stop), len(tiles)))
    return Order("keys", matrix.n_blocks, last_first, tuple(strips))


def _order_of_cpu(call: Call, plan: Plan, pass_name: Pass, matrix: Matrix) -> Order | None:
    """Chunks of the row blocks of a group of heads, later ones first, or parts of the keys; of the first query head."""
    folds = pass_name == "forward" and call.folds
    heads_q = call.heads_k if folds else call.heads_q
    groups, parts = gcd(call.heads_k, call.heads_v), max(plan.splits, 1)
    units = (1 if call.packed else call.batch) * groups
    if units == 0 or plan.grid == 0 or plan.grid % (units * parts):
        return None
    chunks, row_blocks = plan.grid // (units * parts), heads_q // groups * matrix.m_blocks
    items = []
    for part in range(parts):
        keys = range(matrix.n_blocks * part // parts, matrix.n_blocks * (part + 1) // parts)
        for chunk in reversed(range(chunks)):
            first, last = row_blocks * chunk // chunks, row_blocks * (chunk + 1) // chunks
            rows = range(first, min(last, matrix.m_blocks))
            if rows:
                items.append((rows, keys))
    strips = []
    for index in _sample(len(items)):
        rows, keys = items[index]
        met = [t for t in (matrix.tiles_of_row(m) for m in rows) if t]
        met = [range(max(t.start, keys.start), min(t.stop, keys.stop)) for t in met]
        met = [t for t in met if t]
        width = range(min(t.start for t in met), max(t.stop for t in met)) if met else range(0)
        strips.append(
            Strip(index + 1, _in_queries(matrix, rows), _in_keys(matrix, width), sum(len(t) for t in met)),
        )
    by = "keys" if parts > 1 and chunks == 1 else "queries"
    return Order(by, len(items), chunks > 1, tuple(strips), chunks)
