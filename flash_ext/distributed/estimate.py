"""How long forward and backward of a call take by each method, estimated from what the links of its group carry.

    work       4 flops a head, column and pair that is seen, and 2.5 times that in backward
    ulysses    everything it sends is exposed: two exchanges each way
    allgather  the first chunk of heads, and in backward the last one's gradients; others as far as work hides them not
    ring       steps as far as work hides them not, and the last trip of the gradients; and it joins

Called by choose.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flash_ext.distributed.links import Links

if TYPE_CHECKING:
    from flash_ext.distributed.choose import Facts

BACKWARD = 2.5  # of the work of forward
# NOTE: what a ring's smaller calls and their joins take more, of the work: on two H100 with 131,072 tokens 410.8 ms
# where allgather has 395.9.
JOINING = 0.04


def work(facts: Facts, links: Links) -> float:
    """Seconds of forward, on each rank."""
    (queries, keys), (columns, columns_v) = facts.lengths, facts.columns
    pairs = facts.seen * queries * keys
    return 2.0 * facts.batch * facts.heads[0] * pairs * (columns + columns_v) / facts.total / links.flops


def seconds(method: str, facts: Facts, links: Links, sent: tuple[int, int], chunks: int) -> tuple[float, float]:
    """Of forward and backward together: all of it, and the part in which a rank waits for what travels.

    ``sent``: bytes, forward and backward; ``chunks``: of heads, of allgather.
    """
    ranks = facts.total
    forward = work(facts, links)
    backward = BACKWARD * forward
    there, back = sent
    exchange, neighbour = links.exchange.time, links.neighbour.time
    if method == "ulysses":
        uneven = -(-facts.heads[0] // ranks) * ranks / facts.heads[0]
        exposed = 2 * (exchange(there / 2) + exchange(back / 2))
        return uneven * (forward + backward) + exposed, exposed
    if method == "allgather":
        gather, scatter = exchange(there / chunks), exchange((back - there) / chunks)
        exposed = 2 * gather + scatter + (chunks - 1) * (
            max(0.0, gather - forward / chunks) + max(0.0, gather + scatter - backward / chunks)
        )  # fmt: skip
        return forward + backward + exposed, exposed
    steps = max(ranks - 1, 1)
    keys, gradients = neighbour(there / steps), neighbour((back - there) / ranks)
    exposed = gradients + steps * (
        max(0.0, keys - forward / ranks) + max(0.0, keys + gradients - backward / ranks)
    )  # fmt: skip
    return (1 + JOINING) * (forward + backward) + exposed, exposed
