"""Promise: sectors, conflicts, requests and occupancy are counted as they are by hand."""

from __future__ import annotations

import pytest

np = pytest.importorskip("numpy")

from flash_ext.lab.block_size.lesson import all_blocks  # noqa: E402
from flash_ext.lab.counts import LIMITS, Counts, Limits, occupancy, sectors, useful_bytes, ways  # noqa: E402
from flash_ext.lab.lessons import Variant, lesson  # noqa: E402
from flash_ext.lab.measure import Counted, chosen, count  # noqa: E402

LANES = np.arange(32)
ALL = np.ones((1, 32), bool)


def executed(name: str, variant: str, *size: int) -> Counted:
    """All blocks."""
    one = lesson(name)
    inputs = one.inputs(size)
    found = count(one, one.variant(variant), size, inputs, one.variant(variant).reference(*inputs).contiguous())
    assert found.blocks == found.all_blocks
    return found


def counted(name: str, variant: str, *size: int) -> Counts:
    return executed(name, variant, *size).counts


# A whole warp's load of add at 64 x 64: sectors, the bytes that are used, and the requests of three tensors of 4096
# floats: 3 * 4096 / 32 of 4 bytes, half and a quarter of them of 8 and 16.
ADD = {
    "row_major": (4, 1.0, 384),
    "column_major": (32, 4 / 32, 384),
    "strided": (16, 8 / 32, 384),
    "misaligned": (5, 128 / 160, 384),
    "float2": (8, 1.0, 192),
    "float4": (16, 1.0, 96),
}


@pytest.mark.parametrize("name", ADD)
def test_add(name: str) -> None:
    found = counted("add", name, 64, 64)
    each, used, requests = ADD[name]
    assert found.requests() == requests and not found.shared
    for site in found.sites.values():
        # Also of the last warp of "misaligned": 31 floats in 4 sectors, and element 0.
        assert site.sectors == each * site.requests
    assert found.used() == used


def test_add_where_a_matrix_ends() -> None:
    """3 rows of 5 floats: one warp a row that has anything to do; a row begins 0, 20 and 40 bytes in."""
    found = counted("add", "row_major", 3, 5)
    assert {(site.requests, site.sectors) for site in found.sites.values()} == {(3, 1 + 2 + 1)}
    found = counted("add", "float4", 3, 5)  # 3 threads of 4 floats in one request, and 3 floats one by one
    assert [(site.width, site.requests, site.sectors) for site in found.sites.values()] == [
        *[(16, 1, 2)] * 3,
        *[(4, 3, 3)] * 3,
    ]


# Sectors of a load and of a store, ways of a load and of a store of shared memory, bytes of it, requests at 64 x 64:
# 4096 / 32 on each of the two global sides, as many on the two of the tile; of 16 bytes a quarter but for the turn.
TRANSPOSE = {
    "coalesced_writes": (32, 4, None, None, 0, 256),
    "coalesced_reads": (4, 32, None, None, 0, 256),
    "shared": (4, 4, 32, 1, 4096, 512),
    "padded": (4, 4, 1, 1, 32 * 33 * 4, 512),
    "swizzled": (4, 4, 1, 1, 4096, 512),
    "float4": (16, 16, 1, 1, 4096, 32 + 32 + 128 + 32),
}


@pytest.mark.parametrize("name", TRANSPOSE)
def test_transpose(name: str) -> None:
    found = counted("transpose", name, 64, 64)
    shared = sum(found.shared.values())
    row = [found.sectors(False), found.sectors(True), found.ways(False), found.ways(True), shared, found.requests()]
    assert tuple(row) == TRANSPOSE[name]


WAYS = {"stride_1": 1, "stride_2": 2, "stride_4": 4, "stride_8": 8, "stride_32": 32, "float4": 1}
WAYS |= {"padding": 1, "swizzle": 1}


@pytest.mark.parametrize("name", WAYS)
def test_bank_conflicts(name: str) -> None:
    found = counted("bank_conflicts", name, 2048)
    (load,) = found.of("shared", store=False)
    assert load.worst == WAYS[name] and load.passes == WAYS[name] * load.parts
    assert found.ways(store=True) == 1
    # 2048 / 32 requests, one part each; of 16 bytes 2048 / 128 requests in quarters
    assert (load.requests, load.parts) == ((16, 64) if name == "float4" else (64, 64))


# Loads and passes, stores and passes of shared memory for one block of 256 threads, and all requests. In 8 rounds 4, 2
# and six times 1 warp have work; 2, 4, then 8 threads of a warp share a bank, until less than 8 are left.
ROUNDS, PASSES = 4 + 2 + 6, 4 * 2 + 2 * 4 + 8 + 8 + 8 + 4 + 2 + 1
REDUCTION = {
    "interleaved": (2 * ROUNDS + 1, 2 * PASSES + 1, 8 + ROUNDS, 8 + PASSES, 8),
    "sequential": (2 * ROUNDS + 1, 2 * ROUNDS + 1, 8 + ROUNDS, 8 + ROUNDS, 8),
    "first_add": (2 * ROUNDS + 1, 2 * ROUNDS + 1, 8 + ROUNDS, 8 + ROUNDS, 16),
    "shuffle": (1, 1, 8, 8, 16),
    "float4": (1, 1, 8, 8, 8),
}


@pytest.mark.parametrize("name", REDUCTION)
def test_reduction(name: str) -> None:
    each = {"first_add": 2, "shuffle": 2, "float4": 4}.get(name, 1)
    found = counted("reduction", name, 3 * 256 * each)
    loads, load_passes, stores, store_passes, global_loads = (3 * number for number in REDUCTION[name])
    for store, requests, passes in ((False, loads, load_passes), (True, stores, store_passes)):
        sites = found.of("shared", store)
        assert (sum(site.requests for site in sites), sum(site.passes for site in sites)) == (requests, passes)
    assert sum(site.requests for site in found.of("global", store=False)) == global_loads
    assert found.sectors(store=False) == (16 if name == "float4" else 4)
    assert found.requests() == loads + stores + global_loads + 3


# Loads and passes, stores and passes of shared memory for one block, then additions and barriers.
#
# hillis_steele: 8 warps store their floats; in a round all load their own, and but for the first `step` threads those
# before: 8 warps in 5 rounds, then 7, 6 and 4; all store, and at the end all load: 8 * 8 + 57 + 8 loads. In a round
# 256 - step threads add: 8 * 256 - 255.
# blelloch: a round has 128, 64, ..., 1 pairs, that is 4 + 2 + 6 * 1 warps (ROUNDS) and 2, 4, 8, 8, 8, 4, 2, 1 words of
# a bank (PASSES), as in interleaved; upwards two loads and one store, downwards two of each. Beside these 8 warps
# store, 1 thread stores the 0, and 8 warps load. 2 * 255 additions, and 256 at the end. padded: a request is a pass.
# shuffle: 8 sums are stored, loaded and stored by one warp, and loaded by 7 warps. A warp's scan has 5 * 32 - 31
# additions: 9 of them, and 7 * 32.
SCAN = {
    "hillis_steele": (129, 129, 72, 72, 1793, 9),
    "blelloch": (4 * ROUNDS + 8, 4 * PASSES + 8, 9 + 3 * ROUNDS, 9 + 3 * PASSES, 766, 18),
    "padded": (4 * ROUNDS + 8, 4 * ROUNDS + 8, 9 + 3 * ROUNDS, 9 + 3 * ROUNDS, 766, 18),
    "shuffle": (8, 8, 9, 9, 9 * 129 + 224, 2),
}


@pytest.mark.parametrize("name", SCAN)
def test_scan(name: str) -> None:
    found = executed("scan", name, 3 * 256)
    loads, load_passes, stores, store_passes, additions, barriers = (3 * number for number in SCAN[name])
    for store, requests, passes in ((False, loads, load_passes), (True, stores, store_passes)):
        sites = found.counts.of("shared", store)
        assert (sum(site.requests for site in sites), sum(site.passes for site in sites)) == (requests, passes)
        assert found.counts.sectors(store) == 4
    assert (found.work.additions, found.work.barriers) == (additions, barriers)
    assert found.counts.requests() == loads + stores + 2 * 3 * 8


def test_look_back() -> None:
    """40 tiles of 1024 floats, in step: when they look back, all have published a sum and none a prefix."""
    tiles = 40
    found = executed("scan", "look_back", 1024 * tiles)
    names = ("x", "out", "drawn", "flags", "sums")
    requests = {name: [0, 0] for name in names}
    for site in found.counts.sites.values():
        if site.space == "global":
            requests[site.memory][site.store] += site.requests
    # A look asks for the flags and sums of 32 tiles, as far as there are any: a first look of all tiles but 0, and a
    # second of tiles 33 to 39. Tile 32 has seen all at the first, but must look again to see that nothing is left.
    asked = (tiles - 1) + 7
    assert requests == {
        "x": [tiles * 32, 0],
        "out": [0, tiles * 32],
        "drawn": [0, tiles],
        "flags": [asked, 2 * tiles],
        "sums": [asked, 2 * tiles],
    }
    # Scans of 4 rows of 8 warps, of their sums and of what the lanes have seen; for each float the sum of the rows and
    # that of the warps before; the prefix, what 9 lanes store, and once each tile before.
    assert found.work.additions == tiles * (129 * (32 + 1 + 1) + 2 * 1024 + 1 + 9) + sum(range(tiles))
    assert found.work.barriers == 3 * tiles


# KiB of a tile, and of how many there is room for beside 1 KiB each: in 164 and in 228 KiB, but 8 blocks of
# 256 threads at most.
BLOCKS = {8: (8, 8), 16: (8, 8), 24: (6, 8), 32: (4, 6), 48: (3, 4)}


@pytest.mark.parametrize("variant", lesson("block_size").variants, ids=lambda variant: variant.name)
def test_block_size(variant: Variant) -> None:
    """48 rows of 256 floats or 512 halves are 48 KiB, 96 requests of 16 bytes a thread on each of four sides."""
    found = counted("block_size", variant.name, 48)
    kib = variant.defines["ROWS"] * variant.defines["HEAD_DIM"] * (2 if "half" in variant.name else 4) // 1024
    assert found.shared == {"tile": 1024 * kib} and tuple(all_blocks(1024 * kib)) == BLOCKS[kib]
    assert [site.requests for site in found.sites.values()] == [96] * 4
    assert (found.sectors(False), found.sectors(True), found.ways(False), found.ways(True)) == (16, 16, 1, 1)


# One tile of 32 rows, 62 floats each, in rows of 64: global loads, their sectors, stores to shared memory, their passes
# over what they need. A row of floats is 2 requests of 4 sectors, two rows of chunks are one of 16. The last chunk of
# a row has 2 floats. In "tail" the two threads of a warp that have one load twice, 2 sectors, and store 4 times; in
# "unaligned" 8 warps load and store those of 4 rows; in "cp_async" it is a chunk as all.
LOAD_TILE = {
    "row_each": (62, 62 * 32, 64, 4),
    "scalar": (64, 64 * 4, 64, 1),
    "float4": (64, 64 * 4, 64, 1),
    "tail": (16 + 16 * 2, 16 * 16 + 16 * 2 * 2, 16 + 16 * 4, 1),
    "unaligned": (16 + 8, 16 * 16 + 8 * 4, 16 + 8, 1),
    "cp_async": (16, 16 * 16, 16, 1),
}


@pytest.mark.parametrize("name", LOAD_TILE)
def test_load_tile(name: str) -> None:
    found = counted("load_tile", name, 32, 62, 64)
    loads, stores = found.of("global", store=False), found.of("shared", store=True)
    row = [sum(site.requests for site in loads), sum(site.sectors for site in loads)]
    assert (*row, sum(site.requests for site in stores), found.ways(store=True)) == LOAD_TILE[name]
    assert sum(site.useful for site in loads) == 32 * 62 * 4  # each float once, and none of those between rows
    assert found.shared == {"tile": 32 * 260 * 4} and found.ways(store=False) == 1
    assert found.requests() == row[0] + LOAD_TILE[name][2] + 64 + 64  # out of the tile, to out


# Rows of 63 begin 0, 3, 2, 1 floats behind a multiple of 16 bytes: 32 rows have 16 requests of chunks, and 8 of heads
# and tails, of 4 rows each; 4 where there are heads alone, of 8 rows each.
@pytest.mark.parametrize("name, each", [("scalar", 64), ("unaligned", 16 + 8), ("cp_async", 16 + 4)])
def test_load_tile_of_rows_that_are_not_aligned(name: str, each: int) -> None:
    found = counted("load_tile", name, 32, 62, 63)
    assert found.requests() == each + each + 64 + 64
    assert sum(site.useful for site in found.of("global", store=False)) == 32 * 62 * 4


# 64 x 64 x 64. Global loads and their sectors, stores and theirs, stores to and loads from shared memory, its bytes.
# c has 128 warps of one element a thread, and 64 steps for each. "shared" has 4 blocks of 32 warps, 2 tiles deep, the
# rest one block and 4 tiles of 16 deep, which are 2 * 1024 floats: 64 requests, or 16 of 16 bytes. A warp of
# "registers" loads 8 numbers a step, one of "float4" 2 times 4, one of "cp_async" 8 times 4 for 4 steps, one of "mma",
# of 4, 16 for 8 steps. Of c a warp stores 32 neighbours, or 16 in each of two rows, 4 at once from "float4" on; or, in
# "mma", half a sector in each of 8 rows.
MATMUL = {
    "row_is_x": (128 * 128, 128 * 64 * (32 + 1), 128, 128 * 32, 0, 0, 0),
    "column_is_x": (128 * 128, 128 * 64 * (1 + 4), 128, 128 * 4, 0, 0, 0),
    "shared": (4 * 32 * 2 * 2, 4 * 512, 128, 128 * 4, 512, 4 * 32 * 64 * 2, 2 * 4096),
    "registers": (4 * 64, 4 * 256, 8 * 16, 128 * 4, 256, 8 * 64 * 8, 2 * 4096),
    "float4": (4 * 16, 16 * 64, 8 * 4, 32 * 16, 4 * 8 * (4 + 1), 8 * 64 * 2, 16 * 4 * (68 + 64)),
    "cp_async": (4 * 16, 16 * 64, 8 * 4, 32 * 16, 64, 8 * 16 * 8, 4 * 4096),
    "mma": (4 * 16, 16 * 64, 4 * 32, 128 * 8, 64, 4 * 8 * 16, 4 * 4096),
}


@pytest.mark.parametrize("name", MATMUL)
def test_matmul(name: str) -> None:
    found = counted("matmul", name, 64, 64, 64)
    row = []
    for store in (False, True):
        sites = found.of("global", store)
        row += [sum(site.requests for site in sites), sum(site.sectors for site in sites)]
    row += [sum(site.requests for site in found.of("shared", store)) for store in (True, False)]
    assert (*row, sum(found.shared.values())) == MATMUL[name]
    assert found.bytes_moved() == 32 * (row[1] + row[3])
    # "float4" turns its tile: 4 stores of 2 passes, beside one of four quarters
    expected = (None, None) if not found.shared else (1, (4 * 2 + 4) / (4 + 4) if name == "float4" else 1)
    assert (found.ways(store=False), found.ways(store=True)) == expected


# One head, 64 tokens, head dim 64. Global requests of loads and their sectors, of stores and theirs; requests to shared
# memory, stores then loads; its bytes. Two warps of 32 rows: q is 64 loads of 32 sectors for each, a key and a value 64
# loads of 1. "naive" reads keys three times. In "warp" a row is 64 warps' own: q, 64 keys and 64 values, 8 sectors.
# "tile" brings 2 tiles of 2 x 32 rows, 1024 chunks of 16 bytes each: 32 loads of 16 sectors, and as many stores; from
# it a warp loads a key's 16 chunks, and a value's 64 floats. "mma" has 4 warps: a load of q is 8 rows of half a sector,
# 32 of them; tiles as before; a fragment of 8 keys x 8 columns is 2 loads, of k and of v, 2 tiles x 4 x 8 of them for
# each warp; a store is half a sector of 8 rows.
TINY_FLASH = {
    "naive": (2 * (64 + 4 * 64 * 64), 2 * (64 * 32 + 4 * 64 * 64), 128, 128 * 32, 0, 0, 0),
    "online": (2 * (64 + 2 * 64 * 64), 2 * (64 * 32 + 2 * 64 * 64), 128, 128 * 32, 0, 0, 0),
    "warp": (64 * (1 + 128), 64 * (1 + 128) * 8, 64, 64 * 8, 0, 0, 0),
    "tile": (2 * 64 + 64, 2 * 64 * 32 + 64 * 16, 128, 128 * 32, 64, 2 * 64 * (16 + 64), 2 * 32 * 64 * 4),
    "mma": (4 * 32 + 64, 4 * 32 * 8 + 64 * 16, 4 * 32, 4 * 32 * 8, 64, 4 * 2 * 2 * 64, 2 * 32 * 68 * 4),
}


@pytest.mark.parametrize("name", TINY_FLASH)
def test_tiny_flash(name: str) -> None:
    found = counted("tiny_flash", name, 1, 64)
    row = []
    for store in (False, True):
        sites = found.of("global", store)
        row += [sum(site.requests for site in sites), sum(site.sectors for site in sites)]
    row += [sum(site.requests for site in found.of("shared", store)) for store in (True, False)]
    assert (*row, sum(found.shared.values())) == TINY_FLASH[name]
    assert (found.ways(store=False), found.ways(store=True)) == ((1, 1) if found.shared else (None, None))


# One image of one window, one head: global requests of loads and of stores, requests to shared memory, stores then
# loads, its bytes. Two warps have 32 and 17 of the 49 queries: q and out are 32 requests of each; a key is 32 + 32
# loads and one of the bias, in "shared" the bias alone, and 2 x 49 rows once. "warp" has 4 warps: 3 x 49 rows,
# 49 rows of out; a query asks for 2 keys a thread 32 times, and for 49 values. Of the bias it reads what it sees: the
# window has 4 and 3 rows and columns from the two ends of the image, so 28 queries see none of keys 32 to 48 and
# 9 others none of keys 0 to 31.
SWIN = {
    "partition": (2 * (32 + 49 * 65), 2 * 32, 0, 0, 0),
    "row_each": (2 * (32 + 49 * 65), 2 * 32, 0, 0, 0),
    "shared": (2 * (32 + 49) + 2 * 49, 2 * 32, 2 * 49, 2 * 49 * 64, 2 * 49 * 32 * 4),
    "warp": (3 * 49 + 2 * 49 - 28 - 9, 49, 2 * 49, 49 * (2 * 32 + 49), 49 * (33 + 32) * 4),
}


@pytest.mark.parametrize("name", SWIN)
def test_swin(name: str) -> None:
    found = counted("swin", name, 1, 1, 1)
    row = [sum(site.requests for site in found.of("global", store)) for store in (False, True)]
    row += [sum(site.requests for site in found.of("shared", store)) for store in (True, False)]
    assert (*row, sum(found.shared.values())) == SWIN[name]
    assert (found.ways(store=False), found.ways(store=True)) == ((1, 1) if found.shared else (None, None))
    # A row of 32 floats is 4 sectors of a warp, and one of each thread's 32 rows is one each.
    assert found.sectors(store=True) == (4 if name == "warp" else 49 / 2)


def test_sectors_of_one_request() -> None:
    for start, step, expected in ((0, 4, 4), (4, 4, 5), (0, 128, 32), (0, 0, 1), (0, 16, 16)):
        assert sectors((start + step * LANES)[None], ALL) == expected
    assert sectors((4 * LANES)[None], LANES[None] < 9) == 2  # 36 bytes
    assert useful_bytes((4 * (LANES // 2))[None], ALL, 4) == 64  # two threads a word


def test_ways_of_one_request() -> None:
    def of(addresses: np.ndarray, width: int, active: np.ndarray = ALL) -> list[int]:
        return ways(np.asarray(addresses)[None], active, width).tolist()

    assert of(0 * LANES, 4) == [1]  # one word for all
    assert of(4 * (LANES // 2), 4) == [1]
    assert of(4 * LANES * 16, 4) == [16] and of(4 * LANES * 33, 4) == [1]
    assert of(8 * LANES, 8) == [1, 1] and of(16 * LANES, 16) == [1] * 4
    assert of(16 * LANES * 8, 16) == [8] * 4  # each quarter in one group of four banks
    assert of(16 * (LANES // 8), 16) == [1] * 4  # a quarter wants the same 16 bytes
    assert of(4 * LANES * 32, 4, LANES[None] < 3) == [3]
    assert of(16 * LANES, 16, LANES[None] < 8) == [1, 0, 0, 0]


def test_occupancy() -> None:
    """2048 threads and 65536 registers: 32 a thread fill both; 8.0 has 164 KiB, of which a block takes 1 KiB itself."""
    for limits in LIMITS.values():
        assert occupancy(limits, 256, 0, 32) == (1.0, "threads")
        assert occupancy(limits, 256, 0, 33) == (0.75, "registers")  # 1280 a warp: 51, in fours 48: 6 blocks of 8
        assert occupancy(limits, 32, 0, 16) == (0.5, "blocks")
        assert occupancy(limits, 1024, 0, 65) == (0.0, "registers")
    assert occupancy(LIMITS["8.0"], 256, 40 << 10, None) == (0.5, "shared memory")  # 41 KiB: 4 blocks
    assert occupancy(LIMITS["9.0"], 256, 40 << 10, None) == (0.625, "shared memory")  # 5 of 228
    assert occupancy(Limits(48 << 10, threads=1024), 96, 0, None) == (10 * 96 / 1024, "threads")


def test_a_sample_has_the_ends() -> None:
    assert chosen(7, 256, 256 * 7).tolist() == list(range(7))
    sample = chosen(1000, 256, 256 * 10)
    assert len(sample) == 10 and sample[0] == 0 and sample[-1] == 999


def test_a_site_knows_its_first_request() -> None:
    addresses, active = next(iter(counted("add", "strided", 64, 64).sites.values())).first
    assert addresses.tolist() == (16 * LANES).tolist() and active.all()
