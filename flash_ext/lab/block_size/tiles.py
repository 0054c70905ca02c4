"""What a tile of attention takes: computed for 32 to 192 queries, and asked of flash_ext for its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import flash_ext
from flash_ext.explain import Plan
from flash_ext.lab.counts import LIMITS, Limits, occupancy

ROWS, HEAD_DIMS = (32, 64, 96, 128, 192), (64, 128, 256)
KEYS = 64
ROWS_OF_A_WARP = 16  # of a product on matrix units
KIB = 1024
CAPABILITIES = " / ".join(LIMITS)


@dataclass(frozen=True)
class Tile:
    """So many queries, 64 keys, and elements of so many bytes; a warp has 16 queries."""

    rows: int
    head_dim: int
    bytes: int

    @property
    def threads(self) -> int:
        return 32 * self.rows // ROWS_OF_A_WARP

    @property
    def shared(self) -> int:
        """Bytes of Q, K and V."""
        return (self.rows + 2 * KEYS) * self.head_dim * self.bytes

    @property
    def registers(self) -> tuple[int, int, int]:
        """Of a thread: S in float32, P in 16 bits and O in float32; of 16 rows, whatever the tile has."""
        scores = ROWS_OF_A_WARP * KEYS // 32
        return scores, scores // 2, ROWS_OF_A_WARP * self.head_dim // 32

    @property
    def flops_a_byte(self) -> float:
        """Of K and V as they are read: 2 products, of 2 FLOPs for each query, key and column."""
        return 4 * self.rows * KEYS * self.head_dim / (2 * KEYS * self.head_dim * self.bytes)

    def blocks(self, limits: Limits) -> tuple[int, str]:
        """How many a multiprocessor holds, if a thread had S, P and O alone, and what limits them."""
        share, limit = occupancy(limits, self.threads, self.shared, sum(self.registers))
        return round(share * limits.threads / self.threads), limit


def computed() -> list[list[str]]:
    """A line for each head dim and number of queries, with the titles first."""
    titles = ["head dim", "queries", "registers for S, P, O"]
    for bits in (16, 32):
        titles += [f"Q, K, V of {bits} bits, KiB", f"blocks {CAPABILITIES}", "FLOPs a byte"]
    lines = [titles]
    for head_dim in HEAD_DIMS:
        for rows in ROWS:
            line = [str(head_dim), str(rows), str(sum(Tile(rows, head_dim, 2).registers))]
            for size in (2, 4):
                tile = Tile(rows, head_dim, size)
                blocks = [tile.blocks(limits)[0] for limits in LIMITS.values()]
                line += [f"{tile.shared / KIB:g}", " / ".join(map(str, blocks)), f"{tile.flops_a_byte:g}"]
            lines.append(line)
    return lines


def plan(backend: str, head_dim: int, dtype: torch.dtype) -> Plan | None:
    """Of a long forward on this machine's GPU, or without one on an H200; None if the build cannot make it."""
    tensor = torch.empty(2, 16, 16384, head_dim, dtype=dtype, device="meta")
    try:
        with flash_ext.use_backend(backend):
            return flash_ext.explain(tensor, tensor, tensor, device="cuda").forward
    except flash_ext.AttentionError:
        return None


def chosen() -> list[list[str]]:
    """The tiles of flash_ext, with the titles first; no line where a build has no kernels for GPUs."""
    lines = [["head dim", "kernels", "dtype", "queries x keys", "stages", "shared memory, KiB"]]
    for head_dim in HEAD_DIMS:
        for backend, dtype in (("sm90", torch.bfloat16), ("sm80", torch.bfloat16), ("sm80", torch.float32)):
            if found := plan(backend, head_dim, dtype):
                tile = f"{found.block_m} x {found.block_n}"
                kind = str(dtype).removeprefix("torch.")
                stages, size = str(found.stages), f"{found.on_chip_bytes / KIB:.1f}"
                lines.append([str(head_dim), backend, kind, tile, stages, size])
    return lines


def tables() -> dict[str, list[list[str]]]:
    """By title."""
    found = {f"Computed: a tile of queries and {KEYS} keys": computed()}
    own = chosen()
    if len(own) > 1:
        found["Used: what flash_ext.explain plans for 16,384 tokens"] = own
    return found
