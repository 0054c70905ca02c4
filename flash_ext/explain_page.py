"""The page of ``Explanation.html``: one HTML file with its data inside, no network. Layout and script are
explain_page.html; what it draws is counted here and in explain_tiles.py."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib import resources
from typing import Any

from flash_ext.explain import _ROWS, Candidate, Explanation, Plan
from flash_ext.explain_tiles import Call, Matrix, Order, Pass, matrix_of, order_of

# What the parts of Plan.schedule mean.
SCHEDULE = {
    "overlap": "the softmax of a tile of keys runs under the products of the tiles beside it",
    "ping-pong": "two warpgroups take turns: one multiplies while the other computes its softmax",
    "tiles in turn": "block b computes tiles b, b + grid, b + 2 grid, ... of the list",
    "tiles by a counter": "a block that is done takes the next tile of the list, from a counter in memory",
    "heads of a group share tiles": "a tile has the queries of several query heads of one key head, whose keys are "
    "read once",
    "persistent": "block b stays and computes tiles b, b + grid, b + 2 grid, ... of the list",
    "dq in order": "tiles of keys add to dq one after the other, in one fixed order: the same bits in every run",
    "dq stored at once": "one tile of keys is all there is, so that dq is complete when it is computed",
    "a tile of keys a block": "a block computes one tile of keys: blocks are the list",
    "a tile of queries a block": "a block computes one tile of queries: blocks are the list",
    "then a tile of queries": "dk and dv come first, tile of keys by tile of keys; a second kernel makes dq, tile of "
    "queries by tile of queries. Drawn is the first",
}


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def call_text(call: Call) -> list[str]:
    """Sizes, types and band in words."""
    dims = f"head dim {call.head_dim}" + (f" and {call.head_dim_v}" if call.head_dim_v != call.head_dim else "")
    keys = [f"{call.heads_k} key heads" if call.heads_k != 1 else "1 key head"] if call.heads_k != call.heads_q else []
    left, right = call.window
    parts = [
        f"{_count(call.batch, 'packed sequence')}, the longest drawn" if call.packed else f"batch {call.batch:,}",
        ", ".join([_count(call.heads_q, "query head" if keys else "head"), *keys]),
        f"{call.len_q:,} queries x {call.len_k:,} keys",
        dims,
        call.dtype,
        "causal" if call.causal else "",
        f"window {left if left is not None else 'open'} left, {right if right is not None else 'open'} right"
        if (left, right) != (None, None)
        else "",
        "aligned bottom right" if call.align == "bottom_right" else "",
        *call.added,
        "batch-invariant" if call.batch_invariant else "",
    ]
    return [part for part in parts if part]


def order_text(call: Call, plan: Plan, name: Pass, order: Order | None) -> list[str]:
    """Who computes what, and in which order, as far as the plan says it."""
    if not plan.block_m:
        return [
            "No kernel runs, so there are no tiles and no blocks: torch operators compute blocks of queries. "
            "The picture is the band alone, in cells of its own."
        ]
    if order is None:
        packed = "Tiles of all sequences are in one list, which is made on the device: the plan has no order for one. "
        return [packed + "Drawn is the longest sequence."] if call.packed else []
    if plan.backend == "cpu":
        return _cpu_text(call, plan, name, order)
    if "one_tile" in plan.kernel:
        return ["A head is one tile, and a block computes whole heads."]
    heads = call.heads_q // call.heads_k
    if order.by == "queries":
        row = f"A block computes a tile of {plan.block_m} queries of one query head, over the keys that they see."
        ends = ("the last queries, which see more keys than the first", "the first queries")
    else:
        each = f", for each of the {heads} query heads that read them" if heads > 1 else ""
        row = f"A block computes a tile of {plan.block_n} keys of one key head{each}, over the queries that see them."
        ends = ("the last keys", "the first keys")
    if plan.splits > 1:
        row += f" The keys of a tile are in {plan.splits} parts of {plan.split_keys:,}, each the work of a block."
    text = [row]
    if order.count > 1:
        text.append(f"Those of a head begin with {ends[0] if order.last_first else ends[1]}.")
    of_head = call.heads_k if order.by == "keys" or "share tiles" in plan.schedule else call.heads_q
    everything = order.count * (call.heads_k if name == "forward" and call.folds else of_head) * call.batch
    text.append(f"This head has {order.count:,} of them, the list of all heads {everything:,}.")
    kv_heads = call.batch * call.heads_k
    if 0 < plan.l2_section < kv_heads:
        text.append(
            f"The list goes by sections of {plan.l2_section:,} of {kv_heads:,} key heads (the last one may have more), "
            "so that L2 holds what they share; in a section it goes by tiles, of each for all its heads."
        )
    elif plan.l2_section and kv_heads > 1:
        text.append("The list goes by tiles, of each for all heads.")
    return text


def _cpu_text(call: Call, plan: Plan, name: Pass, order: Order) -> list[str]:
    text = [f"A thread takes the next of {_count(plan.grid, 'item')} from a counter."]
    if order.chunks > 1:
        text.append(
            f"The queries of a group of heads are cut into {order.chunks} items, of which the last ones come first: "
            "under a causal band they are the longer ones."
        )
    elif plan.splits > 1:
        text.append(f"An item has one of {plan.splits} parts of the keys, and a second pass adds dq up in order.")
    else:
        text.append("An item is a whole group of heads.")
    if name == "forward":
        text.append("Within it keys are the outer loop: a tile of keys is packed once and serves all its queries.")
    else:
        text.append("Within it queries are the outer loop: dq stays in cache, dk and dv are summed over all of them.")
    if call.heads_q > call.heads_k and order.chunks > 1:
        text.append("Drawn are the items of the first query head.")
    return text


def matrix_data(call: Call, plan: Plan, name: Pass) -> dict[str, Any] | None:
    """Tiles, their kinds and numbers, and the strips of them that blocks compute."""
    matrix = matrix_of(call, plan, name)
    if matrix is None:
        return None
    cells, order = matrix.cells(), order_of(call, plan, name, matrix)
    counts = matrix.counts() if plan.block_m else None
    strips = [[s.number, *s.queries, *s.keys, s.tiles] for s in order.strips] if order else []
    return {
        "lenQ": matrix.len_q,
        "lenK": matrix.len_k,
        "blockM": matrix.block_m,
        "blockN": matrix.block_n,
        "hasTiles": plan.block_m > 0,
        "stepM": cells.step_m,
        "stepN": cells.step_n,
        "cells": cells.rows,
        "counts": asdict(counts) if counts else None,
        "note": _matrix_note(call, plan, name, matrix),
        "by": order.by if order else None,
        "count": order.count if order else 0,
        "strips": strips,
        "order": order_text(call, plan, name, order),
    }


def _matrix_note(call: Call, plan: Plan, name: Pass, matrix: Matrix) -> str:
    notes = []
    if name == "forward" and call.folds:
        notes.append(
            f"One query of grouped heads runs as one head of {matrix.len_q} queries, one for each query head of a key "
            f"head, over the {matrix.len_k:,} keys that it sees."
        )
    if "share tiles" in plan.schedule:
        notes.append("A tile has the queries of several heads; drawn are those of one.")
    if "mask" in call.added:
        notes.append("The mask hides more: its values are not looked at.")
    return " ".join(notes)


def waves_data(plan: Plan) -> dict[str, Any]:
    return {
        "waves": plan.waves,
        "grid": plan.grid,
        "unit": "item" if plan.backend == "cpu" else "block",
        "places": "threads" if plan.backend == "cpu" else "multiprocessors",
        "resident": plan.resident_blocks,
        "occupancy": plan.occupancy,
        "registers": plan.registers,
    }


_DRAWN = ("backend", "kernel", "tile", "schedule", "on chip", "occupancy")  # elsewhere on the page


def pass_data(explanation: Explanation, name: Pass) -> dict[str, Any]:
    plan: Plan = getattr(explanation, name)
    facts = [(label, value(plan)) for label, value in _ROWS if label not in _DRAWN]
    phrases = [phrase for phrase in plan.schedule.split(", ") if phrase]
    return {
        "name": name,
        "backend": plan.backend,
        "kernel": plan.kernel,
        "facts": [(label, value) for label, value in facts if value != "-"],
        "schedule": [(phrase, SCHEDULE.get(phrase, "")) for phrase in phrases],
        "matrix": matrix_data(explanation.call, plan, name) if explanation.call else None,
        "chip": {
            "title": "Buffers of a thread, by use" if plan.backend == "cpu" else "Shared memory of a block, by use",
            "limitName": "its cache" if plan.backend == "cpu" else "what a block may have",
            "uses": [*plan.on_chip, *([("static", plan.static_bytes)] if plan.static_bytes else [])],
            "limit": plan.on_chip_limit,
        },
        "run": waves_data(plan),
    }


def _verdict(candidate: Candidate) -> str:
    if candidate.reason:
        return f"refuses: {candidate.reason}"
    beside = f", with {candidate.bias_gradient} for the gradient of the bias" if candidate.bias_gradient else ""
    return ("runs" if candidate.chosen else "could run") + beside


def data(explanation: Explanation) -> dict[str, Any]:
    """What the script reads."""
    return {
        "call": call_text(explanation.call) if explanation.call else [],
        "passes": [pass_data(explanation, "forward"), pass_data(explanation, "backward")],
        "candidates": [
            {
                "pass": c.pass_name,
                "kernel": c.kernel,
                "backend": c.backend,
                "cost": c.cost_us,
                "verdict": _verdict(c),
                "state": "refused" if c.reason else "chosen" if c.chosen else "other",
            }
            for c in explanation.candidates
        ],
        "copies": [asdict(c) for c in explanation.copies],
        "text": str(explanation),
    }


def page(explanation: Explanation) -> str:
    """The HTML."""
    template = (resources.files("flash_ext") / "explain_page.html").read_text(encoding="utf-8")
    text = json.dumps(data(explanation), separators=(",", ":")).replace("<", "\\u003c")
    return template.replace("@DATA@", text)
