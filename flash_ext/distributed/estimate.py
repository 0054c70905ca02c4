"""How long forward and backward of a call take by each method, estimated from what the links of its group carry.

    work       4 flops a head, column and pair that is seen, and 2.5 times that in backward
    ulysses    everything it sends is exposed: two exchanges each way
    allgather  the first chunk of heads, and in backward the last one's gradients; others as far as work hides them not
    ring       steps as far as work hides them not, and the last trip of the gradients; what joining takes is not in it

Work is that of the rank that has most. What it hides slows it, by ``SLOWED`` of the time that it travels: what moves it
takes multiprocessors and memory from the work. Called by choose.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flash_ext.distributed.links import Links

if TYPE_CHECKING:
    from flash_ext.distributed.choose import Facts

BACKWARD = 2.5  # of the work of forward
# NOTE: with 0 allgather of 16,384 tokens, 32 heads of query and key, was estimated at 0.93 of ulysses on 2 H200, and
# took 1.39 of its time.
SLOWED = 0.5


def work(facts: Facts, links: Links) -> float:
    """Seconds of forward, of a rank that has as much as the others."""
    (queries, keys), (columns, columns_v) = facts.lengths, facts.columns
    pairs = facts.seen * queries * keys
    return 2.0 * facts.batch * facts.heads[0] * pairs * (columns + columns_v) / facts.total / links.flops


def seconds(method: str, facts: Facts, links: Links, sent: tuple[int, int], chunks: int) -> tuple[float, float]:
    """Of forward and backward together: all of it, and the part in which a rank waits for what travels.

    ``sent``: bytes, forward and backward; ``chunks``: of heads, of allgather.
    """
    ranks = facts.total
    heads = max(facts.heads[0], 1)
    most = -(-heads // ranks) * ranks / heads if method == "ulysses" else facts.busiest
    forward = most * work(facts, links)
    backward = BACKWARD * forward
    there, back = sent
    exchange, neighbour = links.exchange.time, links.neighbour.time
    if method == "ulysses":
        exposed = 2 * (exchange(there / 2) + exchange(back / 2))
        return forward + backward + exposed, exposed
    if method == "allgather":
        gather, scatter = exchange(there / chunks), exchange((back - there) / chunks)
        exposed = 2 * gather + scatter + (chunks - 1) * (
            max(0.0, gather - forward / chunks) + max(0.0, gather + scatter - backward / chunks)
        )  # fmt: skip
        travels = chunks * (2 * gather + scatter)
        return forward + backward + exposed + SLOWED * (travels - exposed), exposed
    steps = max(ranks - 1, 1)
    keys, gradients = neighbour(there / steps), neighbour((back - there) / ranks)
    exposed = gradients + steps * (
        max(0.0, keys - forward / ranks) + max(0.0, keys + gradients - backward / ranks)
    )  # fmt: skip
    travels = gradients + steps * (2 * keys + gradients)
    return forward + backward + exposed + SLOWED * (travels - exposed), exposed
