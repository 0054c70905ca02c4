"""What a kernel's addresses cost: sectors of global memory, passes over shared memory's banks, and occupancy.

Global memory moves in sectors of 32 bytes, and a warp's request takes every sector that one of its threads touches.
Shared memory has 32 banks of 4 bytes; one pass serves one word of each bank, to every thread that wants it. Requests of
8 and 16 bytes a thread are served by halves and quarters of the warp. n words of one bank are an n-way conflict.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from flash_ext.lab.memory import WARP, WORD, Access
from flash_ext.lab.source import Node

SECTOR, BANKS = 32, 32


def distinct(rows: np.ndarray, active: np.ndarray) -> np.ndarray:
    """True at one place for each distinct number among the active ones of a row, with the rows sorted."""
    ordered = np.sort(np.where(active, rows, np.iinfo(np.int64).max), axis=1)
    new = np.diff(ordered, axis=1, prepend=-1) != 0
    return new & (ordered != np.iinfo(np.int64).max)


def words_of(
    addresses: np.ndarray, active: np.ndarray, width: int, wanted: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Each row's words of 4 bytes, and which of them somebody wants; ``wanted``: bytes, if not the whole width."""
    place = np.arange(width // WORD)
    words = addresses[:, :, None] // WORD + place
    taken = active[:, :, None] & (WORD * place < (width if wanted is None else wanted[:, :, None]))
    return words.reshape(len(words), -1), taken.reshape(len(words), -1)


def sectors(addresses: np.ndarray, active: np.ndarray) -> np.ndarray:
    """Of each request, a row of 32 byte addresses: how many sectors it takes."""
    return distinct(addresses // SECTOR, active).sum(1)


def useful_bytes(addresses: np.ndarray, active: np.ndarray, width: int, wanted: np.ndarray | None = None) -> np.ndarray:
    """Of each request: bytes that some thread asked for, each once."""
    return WORD * distinct(*words_of(addresses, active, width, wanted)).sum(1)


def ways(addresses: np.ndarray, active: np.ndarray, width: int) -> np.ndarray:
    """Of each part of each request (all of the warp, its halves or its quarters): passes, 0 where nobody is active."""
    lanes = WARP * WORD // width
    words, wanted = words_of(addresses.reshape(-1, lanes), active.reshape(-1, lanes), width)
    words = np.where(wanted, words, -1)
    words = np.sort(words, axis=1)
    new = (np.diff(words, axis=1, prepend=-1) != 0) & (words >= 0)
    row = np.arange(len(words))[:, None]
    return np.bincount((row * BANKS + words % BANKS)[new], minlength=len(words) * BANKS).reshape(-1, BANKS).max(1)


@dataclass
class Site:
    """One place of the source that touches memory, and what all its requests cost together."""

    line: int
    memory: str
    space: str
    store: bool
    width: int
    requests: int = 0
    sectors: int = 0
    useful: int = 0  # bytes
    parts: int = 0  # of requests to shared memory: whole warps, halves or quarters
    passes: int = 0
    worst: int = 0  # ways
    first: tuple[np.ndarray, np.ndarray] | None = None  # the first request: addresses, active
    wanted: np.ndarray | None = None  # of the first request: bytes, where they need not be the whole width

    def add(self, access: Access) -> None:
        addresses, active = access.addresses.reshape(-1, WARP), access.active.reshape(-1, WARP)
        asked = active.any(1)
        addresses, active = addresses[asked], active[asked]
        wanted = None if access.wanted is None else access.wanted.reshape(-1, WARP)[asked]
        self.requests += len(active)
        if self.first is None:
            self.first = addresses[0], active[0]
            self.wanted = None if wanted is None else wanted[0]
        if self.space == "global":
            self.sectors += int(sectors(addresses, active).sum())
            self.useful += int(useful_bytes(addresses, active, self.width, wanted).sum())
        else:
            passes = ways(addresses, active, self.width)
            self.parts += int((passes > 0).sum())
            self.passes += int(passes.sum())
            self.worst = max(self.worst, int(passes.max()))


@dataclass
class Counts:
    """Of one kernel: its sites in the order in which they were met, and what shared memory a block has."""

    sites: dict[tuple[Node, bool], Site] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)  # bytes by name

    def record(self, access: Access) -> None:
        memory = access.memory
        key = access.site, access.store
        if key not in self.sites:
            self.sites[key] = Site(access.site.line, memory.name, memory.space, access.store, access.width)
        if memory.space == "shared":
            self.shared[memory.name] = memory.size * WORD
        self.sites[key].add(access)

    def of(self, space: str, store: bool) -> list[Site]:
        return [site for site in self.sites.values() if site.space == space and site.store == store]

    def sectors(self, store: bool) -> float | None:
        """Sectors of a global request, on average; None if there is none."""
        sites = self.of("global", store)
        return sum(site.sectors for site in sites) / sum(site.requests for site in sites) if sites else None

    def used(self) -> float:
        """The share of all sectors' bytes that some thread asked for."""
        sites = [site for site in self.sites.values() if site.space == "global"]
        return sum(site.useful for site in sites) / (SECTOR * sum(site.sectors for site in sites))

    def ways(self, store: bool) -> float | None:
        """Passes of a request to shared memory over what it needs without conflicts, on average."""
        sites = self.of("shared", store)
        return sum(site.passes for site in sites) / sum(site.parts for site in sites) if sites else None

    def bytes_moved(self) -> int:
        """Of all sectors of global memory, each as often as a request takes it."""
        return SECTOR * sum(site.sectors for site in self.sites.values())

    def requests(self) -> int:
        return sum(site.requests for site in self.sites.values())


@dataclass(frozen=True)
class Limits:
    """Of one multiprocessor."""

    shared: int  # bytes, of which each block costs RESERVED more than it asks for
    threads: int = 2048
    blocks: int = 32
    registers: int = 65536


RESERVED, SHARED_STEP, REGISTER_STEP, WARP_STEP = 1024, 128, 256, 4
LIMITS = {"8.0": Limits(164 << 10), "9.0": Limits(228 << 10)}


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def occupancy(limits: Limits, threads: int, shared: int, registers: int | None) -> tuple[float, str]:
    """The share of a multiprocessor's warps that can be there at once, and what limits it: the first of several.

    Registers are given to a warp in steps of 256, and warps in fours; without them they are left out.
    """
    warps = -(-threads // WARP)
    fits = {"threads": limits.threads // (warps * WARP), "blocks": limits.blocks}
    if registers is not None:
        each = round_up(registers * WARP, REGISTER_STEP)
        fits["registers"] = limits.registers // each // WARP_STEP * WARP_STEP // warps
    if shared:
        fits["shared memory"] = limits.shared // round_up(shared + RESERVED, SHARED_STEP)
    least = min(fits, key=fits.__getitem__)
    return fits[least] * warps * WARP / limits.threads, least
