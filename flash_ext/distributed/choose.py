"""Which method computes a call of context parallel, what each one refuses, and what it sends.

The rule of "auto", of which ``explain_context_parallel`` prints the reason:

1. a mesh of two dimensions: usp;
2. query heads divide over the ranks: allgather where it sends no more, forward and backward together, and does not
   refuse, else ulysses;
3. else allgather, unless its keys and values do not fit (``RING_BYTES``) or it refuses;
4. else ring, unless it refuses;
5. else ulysses with uneven heads;
6. where the links of the group were measured (links.py), another method that takes the call and fits is taken in place
   of that one if its forward and backward are estimated (estimate.py) to take at most ``MARGIN`` of the time. A ring's
   estimate is shown, but neither takes nor gives way: what joining takes is not in it.

With ``batch_invariant`` nothing of this may depend on the batch: step 3 goes by one batch element, packed sequences are
those of ulysses, which computes whole ones, and links do not count. Nor do they with ``deterministic``.

Bytes decide where estimates are close: measured figures differ from run to run, and with the method the last bits of a
result. On 2 H200 with 131,072 tokens and 32/8 heads ulysses takes 0.98 of the time of allgather, which takes half the
memory: its keys and values are few, and it copies nothing else. With as many key heads as query heads allgather took
1.39 times as long as ulysses for 16,384 tokens: its backward sends three times the bytes of its forward, gradients in
float. On more ranks what it sends grows, and nothing hides the first chunk (published runs of others: 8 H200, 64k
tokens, 2 and 4 ranks, against one: ulysses -8 and +1 % of the speed, a ring -29 and -32 %; prime-rl #2418).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from flash_ext.distributed import estimate
from flash_ext.distributed.allgather import chunk_count
from flash_ext.distributed.links import Links
from flash_ext.errors import AttentionError

METHODS = ("ulysses", "allgather", "ring", "usp")
RING_BYTES = 8 << 30
MARGIN = 0.9


@dataclass(frozen=True)
class Facts:
    """What the choice depends on. Sizes in elements, of the whole call; ``ranks`` of each dimension of the mesh."""

    ranks: tuple[int, ...]
    batch: int
    heads: tuple[int, int, int]  # of query, key, value
    columns: tuple[int, int]  # of query and key, of value
    lengths: tuple[int, int]
    itemsize: int
    seen: float = 1.0  # of all pairs of query and key, about
    packed: bool = False
    scores: bool = False  # a mask, a bias or dropout
    band_is_packable: bool = True  # causal, or none and no slopes
    dropout_has_map: bool = True  # no dropout, or every part begins where a part of its map may
    batch_invariant: bool = False
    busiest: float = 1.0  # of the pairs that are seen, the largest share of a rank's rows, of the mean

    @property
    def total(self) -> int:
        return math.prod(self.ranks)


def refusal(method: str, facts: Facts) -> str | None:
    """Why a method cannot compute the call, and which one can; None: it can."""
    if (method == "usp") != (len(facts.ranks) == 2):
        return (
            "method='usp' takes a mesh of two dimensions, (across, within), and this is one"
            if method == "usp"
            else f"method={method!r} takes a group or a mesh of one dimension; 'usp' takes two"
        )
    other = "a group of one dimension and 'ulysses'" if method == "usp" else "'ulysses'"
    if method in ("ring", "usp") and facts.packed and facts.scores:
        return f"method={method!r} takes no mask, bias or dropout_p for packed sequences; use {other}"
    if method != "ulysses" and not facts.dropout_has_map:
        return (
            f"method={method!r} takes dropout_p where all chunks of the ranks begin at multiples of 16 tokens, and no "
            f"window to the right cuts rows off; use {other}"
        )
    if method == "allgather" and facts.packed and facts.scores:
        return "method='allgather' takes no mask, bias or dropout_p for packed sequences; use 'ulysses'"
    if method == "allgather" and facts.packed and not facts.band_is_packable:
        return (
            "method='allgather' takes packed sequences with causal=True, or with no window and no alibi_slopes; "
            "use 'ulysses' or 'ring'"
        )
    return None


@dataclass(frozen=True)
class Choice:
    """``method`` computes the call, because ``why``.

    ``sent``: bytes that a rank sends, (forward, backward), for each method; ``refused``: why a method cannot.
    ``links``: what was measured, if it was; ``seconds``: estimated with it, for each method that "auto" may take, of
    forward and backward together: all of it, and what is exposed. ``note``: of what was not measured.
    """

    method: str
    why: str
    sent: dict[str, tuple[int, int]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    links: Links | None = None
    seconds: dict[str, tuple[float, float]] = field(default_factory=dict)
    note: str = ""

    def __str__(self) -> str:
        lines = [f"{self.method}: {self.why}"]
        for method, (there, back) in self.sent.items():
            text = f"  {method:10} a rank sends {there / 2**20:,.1f} MiB forward, {back / 2**20:,.1f} MiB backward"
            if method in self.seconds:
                whole, exposed = (1e3 * of for of in self.seconds[method])
                text += f", estimated {whole:,.4g} ms with {exposed:,.3g} ms exposed"
            lines.append(text)
        lines += [f"  {method:10} refuses: {why}" for method, why in self.refused.items()]
        measured = self.note if self.links is None else str(self.links)
        return "\n".join([*lines, f"  measured   {measured}"] if measured else lines)


def choose(method: str, facts: Facts, links: Links | None = None) -> Choice:
    """Raises AttentionError where a method that was asked for refuses. ``links``: the same on all ranks."""
    refused = {name: why for name in METHODS if (why := refusal(name, facts)) is not None}
    sent = {name: sent_bytes(name, facts) for name in METHODS if name not in refused}
    if method != "auto":
        if method in refused:
            raise AttentionError(refused[method])
        return Choice(method, "asked for", sent, refused)
    name, why = _by_bytes(facts, refused, sent)
    if name in refused:
        raise AttentionError(refused[name])
    if links is None or len(facts.ranks) == 2:
        return Choice(name, why, sent, refused)
    chunks = chunk_count(math.gcd(*facts.heads[1:]), _gathered(facts))
    seconds = {
        other: estimate.seconds(other, facts, links, sent[other], chunks)
        for other in sent if other in (name, "ulysses", "ring") or _gathered(facts) <= RING_BYTES
    }  # fmt: skip
    best = min((other for other in seconds if other != "ring"), key=lambda other: seconds[other][0])
    if name != "ring" and seconds[best][0] <= MARGIN * seconds[name][0]:
        instead = seconds[name][0] / max(seconds[best][0], 1e-12)
        name, why = best, f"by the measured links {name} is estimated to take {instead:.3g} times as long"
    return Choice(name, why, sent, refused, links, seconds)


def _by_bytes(facts: Facts, refused: dict[str, str], sent: dict[str, tuple[int, int]]) -> tuple[str, str]:
    if len(facts.ranks) == 2:
        return "usp", "the mesh has two dimensions"
    if facts.packed and facts.batch_invariant:
        return "ulysses", "of packed sequences it alone computes whole ones, whose bits no neighbour changes"
    ranks, heads = facts.total, facts.heads[0]
    if heads % ranks == 0:
        why = f"{heads} heads of query divide over {ranks} ranks"
        if "allgather" in sent and sum(sent["allgather"]) <= sum(sent["ulysses"]):
            return "allgather", f"{why}, but the keys and values of all are less than the heads to exchange"
        return "ulysses", why
    why = f"{heads} heads of query do not divide over {ranks} ranks"
    gathered, of_one = _gathered(facts), ""
    if facts.batch_invariant:
        gathered, of_one = gathered // max(facts.batch, 1), " of one batch element"
    if "allgather" not in refused and gathered <= RING_BYTES:
        return "allgather", f"{why}, and key and value{of_one} take {gathered / 2**20:,.1f} MiB gathered"
    if "ring" not in refused:
        size = f"{gathered / 2**20:,.1f} MiB"
        return "ring", f"{why}, and key and value{of_one} gathered would take {size} or are refused"
    return "ulysses", f"{why}, and the other methods refuse"


def _gathered(facts: Facts) -> int:
    return facts.lengths[1] * _key_columns(facts) * facts.itemsize


def _key_columns(facts: Facts) -> int:
    (_, of_key, of_value), (columns, columns_v) = facts.heads, facts.columns
    return facts.batch * (of_key * columns + of_value * columns_v)


def sent_bytes(method: str, facts: Facts) -> tuple[int, int]:
    """Bytes that a rank sends, forward and backward, with lengths alike and nothing hidden."""
    wide = 8 if facts.itemsize == 8 else 4
    n_q, n_k = (length // facts.total for length in facts.lengths)
    columns = _key_columns(facts)
    if method == "allgather":
        rows = n_k * (facts.total - 1)
        return rows * columns * facts.itemsize, rows * columns * (facts.itemsize + wide)
    if method == "ring":
        rows = n_k * (facts.total - 1)
        return rows * columns * facts.itemsize, rows * columns * facts.itemsize + (rows + n_k) * columns * wide
    inner = facts.ranks[-1]
    # NOTE: a key head goes to each rank whose queries read it.
    copies = max(1, inner // max(min(facts.heads[1:]), 1))
    of_queries = facts.batch * facts.heads[0] * sum(facts.columns)
    exchanged = (n_q * of_queries + n_k * columns * copies) * facts.itemsize * (inner - 1) // inner
    if method == "ulysses":
        return exchanged, exchanged
    outer = facts.ranks[0]
    share = columns * copies // inner
    rows = n_k * inner * (outer - 1)
    around = rows * share * facts.itemsize
    return exchanged + around, exchanged + around + (rows + n_k * inner) * share * wide
