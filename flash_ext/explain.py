"""What a call would run, and why: ``explain`` launches nothing and allocates nothing."""

from __future__ import annotations

import json
import tempfile
import webbrowser
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from flash_ext.arguments import Window, check_band, flag, number
from flash_ext.attention import check_native
from flash_ext.errors import AttentionError
from flash_ext.explain_tiles import Call
from flash_ext.ops import require_c


@dataclass(frozen=True)
class Plan:
    """One pass as a backend will run it. Tiles in elements, memory in bytes; 0 where a notion does not exist.

    * ``backend``, ``kernel``: who runs it; ``schedule``: how blocks find their tiles.
    * ``block_m``, ``block_n``: queries and keys of a tile; ``stages``: buffers of a tile that arrives ahead.
    * ``on_chip``: uses of shared memory, of a block; ``static_bytes``: what a block has beside; ``on_chip_limit``: what
      it may have. On the CPU buffers of a thread, and its cache.
    * ``scratch_bytes``: memory of the device that the call allocates and gives back.
    * ``grid``: blocks; ``waves``: how often all multiprocessors are filled with them.
    * ``splits``: parts of the keys of a tile of queries, each a block's work, 1 where they are one block's;
      ``split_keys``: keys of a part; ``l2_section``: key heads whose tiles run together, so that L2 holds their keys.
    * Of the compiled kernel, 0 where its device is not in use: ``registers`` of a thread that computes,
      ``producer_registers`` of one that loads, ``local_bytes`` of a thread, which registers did not hold,
      ``resident_blocks`` on a multiprocessor at a time, ``occupancy``: their threads over those that it can have.
    """

    backend: str
    kernel: str
    schedule: str
    block_m: int
    block_n: int
    stages: int
    on_chip: tuple[tuple[str, int], ...]
    on_chip_limit: int
    scratch_bytes: int
    grid: int
    waves: float
    registers: int
    producer_registers: int
    local_bytes: int
    static_bytes: int
    resident_blocks: int
    occupancy: float
    l2_section: int
    splits: int
    split_keys: int

    @property
    def on_chip_bytes(self) -> int:
        return sum(size for _, size in self.on_chip)


@dataclass(frozen=True)
class Candidate:
    """A kernel that was considered for a pass. Of those without a reason to refuse, the one of least cost runs.

    ``cost_us`` is rough: microseconds, and a penalty for much scratch memory, by which kernels of a pass are compared;
    0 where no other one serves its calls. Of a batch-invariant call it is that of one size, whatever the lengths are.
    ``bias_gradient`` names the kernel that makes the gradient of the bias for it, where it does not make it itself.
    """

    kernel: str
    backend: str
    pass_name: str
    reason: str
    cost_us: float
    bias_gradient: str
    chosen: bool


@dataclass(frozen=True)
class Copy:
    argument: str
    bytes: int
    reason: str


@dataclass(frozen=True)
class Explanation:
    """Forward and backward plan, which kernels were considered and what is copied. ``print`` it for a table, ``show``
    it for a page that draws it. ``call`` has the sizes and the band that were asked for."""

    forward: Plan
    backward: Plan
    candidates: tuple[Candidate, ...] = field(default=())
    copies: tuple[Copy, ...] = field(default=())
    batch_invariant: bool = False
    call: Call | None = None

    @property
    def refusals(self) -> tuple[Candidate, ...]:
        """Those that cannot run the pass."""
        return tuple(c for c in self.candidates if c.reason)

    def html(self) -> str:
        """The plan drawn: tiles over the scores, which block computes which in what order, memory and waves.

        Returns:
            One HTML page with all that it needs inside; a browser shows it without a network.
        """
        from flash_ext.explain_page import page

        return page(self)

    def show(self, path: str | Path | None = None) -> Path:
        """Writes the page of ``html`` to a file.

        Args:
            path: of the file; None: a temporary one, which the web browser is asked to open.

        Returns:
            Where the page lies.

        Raises:
            OSError: the file cannot be written.
        """
        text = self.html()
        if path is not None:
            file = Path(path)
            file.write_text(text, encoding="utf-8")
            return file
        with tempfile.NamedTemporaryFile(
            "w", prefix="flash_ext-plan-", suffix=".html", encoding="utf-8", delete=False
        ) as temporary:
            temporary.write(text)
        file = Path(temporary.name)
        webbrowser.open(file.as_uri())
        return file

    def __str__(self) -> str:
        rows = [("", "forward", "backward")]
        for label, value in _ROWS:
            rows.append((label, value(self.forward), value(self.backward)))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        if self.batch_invariant:
            lines.append(_INVARIANT)
        lines += _considered(self.candidates)
        lines += [f"copies {c.argument}: {c.bytes:,} bytes, {c.reason}" for c in self.copies]
        return "\n".join(lines)


def _considered(candidates: Iterable[Candidate]) -> Iterator[str]:
    """A line for each that does not run; a backend of which all say the same is one line."""
    by_pass = defaultdict(lambda: defaultdict(list))
    for candidate in candidates:
        by_pass[candidate.pass_name][candidate.backend].append(candidate)
    for name, by_backend in by_pass.items():
        for backend, rows in by_backend.items():
            if len({row.reason for row in rows}) == 1 and rows[0].reason:
                yield f"{backend} refuses ({name}): {rows[0].reason}"
                continue
            for row in rows:
                if row.reason:
                    yield f"{row.kernel} refuses ({name}): {row.reason}"
                elif not row.chosen:
                    cost = f", at a cost of {row.cost_us:.3g} us" if row.cost_us else ""
                    yield f"{row.kernel} could run ({name}){cost}"


def _uses(plan: Plan) -> str:
    if not plan.on_chip:
        return "-"
    parts = " + ".join(f"{name} {size:,}" for name, size in plan.on_chip)
    beside = f" (and {plan.static_bytes:,})" if plan.static_bytes else ""
    return f"{parts} = {plan.on_chip_bytes:,}{beside} of {plan.on_chip_limit:,} bytes"


def _registers(plan: Plan) -> str:
    spilled = f", {plan.local_bytes:,} bytes in local memory" if plan.local_bytes else ""
    loading = f", {plan.producer_registers} to load" if plan.producer_registers else ""
    return f"{plan.registers} a thread{loading}{spilled}" if plan.registers else "-"


def _occupancy(plan: Plan) -> str:
    blocks = f"{plan.resident_blocks} block{'s' if plan.resident_blocks > 1 else ''} a multiprocessor"
    return f"{blocks}, {plan.occupancy:.0%} of its threads" if plan.resident_blocks else "-"


_ROWS = (
    ("backend", lambda p: p.backend),
    ("kernel", lambda p: p.kernel),
    ("tile", lambda p: f"{p.block_m} queries x {p.block_n} keys" if p.block_m else "-"),
    ("schedule", lambda p: p.schedule or "-"),
    ("stages", lambda p: str(p.stages) if p.stages else "-"),
    ("on chip", _uses),
    ("scratch", lambda p: f"{p.scratch_bytes:,} bytes"),
    ("registers", _registers),
    ("occupancy", _occupancy),
    ("grid", lambda p: f"{p.grid:,} in {p.waves:.2f} waves" if p.grid else "-"),
    ("split", lambda p: f"{p.splits} parts of {p.split_keys:,} keys" if p.splits > 1 else "-"),
    ("L2 section", lambda p: f"{p.l2_section:,} key heads" if p.l2_section else "-"),
)


_INVARIANT = (
    "batch-invariant: kernels and tiles are those of large calls, keys are not split, and sums have one order, "
    "whatever else is in the batch"
)


def _meta(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    shape, stride = tuple(int(n) for n in tensor.shape), tuple(int(n) for n in tensor.stride())
    # As far into its storage as the tensor: a backend may want an aligned start.
    offset = int(tensor.storage_offset())
    return torch.empty_strided((2, *shape), (offset, *stride), dtype=tensor.dtype, device="meta")[1]


def _call(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor | None, max_q: int, max_k: int | None
) -> dict[str, Any]:
    """Sizes of a call that was found to be right, as Call has them."""
    tensors, packed = (query, key, value), cu_seqlens is not None
    if packed:
        heads_q, heads_k, heads_v = (int(t.size(1)) for t in tensors)
        batch, len_q, len_k = int(cu_seqlens.size(0)) - 1, int(max_q), int(max_k)
    else:
        heads_q, heads_k, heads_v = (int(t.size(-3)) if t.dim() > 2 else 1 for t in tensors)
        heads_q = max(heads_q, heads_k, heads_v)  # of the drop-in, which may broadcast them
        batch = prod(torch.broadcast_shapes(*(t.shape[:-3] for t in tensors)))
        len_q, len_k = int(query.size(-2)), int(key.size(-2))
    return {
        "batch": batch,
        "heads_q": heads_q,
        "heads_k": heads_k,
        "heads_v": heads_v,
        "len_q": len_q,
        "len_k": len_k,
        "head_dim": int(query.size(-1)),
        "head_dim_v": int(value.size(-1)),
        "dtype": str(query.dtype).removeprefix("torch."),
        "packed": packed,
    }


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    sdpa: bool = False,
    device: str | torch.device | None = None,
    causal: bool = False,
    window: Window | None = None,
    align: str = "top_left",
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    scale: float | None = None,
    deterministic: bool | None = None,
    batch_invariant: bool = False,
    enable_gqa: bool = False,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_q: int = 0,
    max_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Explanation:
    """The plan that ``attention`` executes for these arguments; with ``sdpa=True`` the plan of
    ``scaled_dot_product_attention``, with ``cu_seqlens_q`` that of ``attention_varlen``, of which the CPU computes one
    sequence after the other: the plan is the longest one's.

    Takes meta and fake tensors. ``device`` plans for a device that is not there; by default the tensors' own (the CPU
    for meta tensors). Backward is planned for the floating inputs that require gradients, or for all if none does.
    Launches nothing, allocates nothing, draws no random numbers.

    Raises:
        AttentionError: as the call itself would. Where a backend that is asked for by name refuses backward alone, the
            backward plan's ``backend`` is "none", and ``refusals`` holds the reasons.
    """
    softcap, dropout_p = number(softcap, "softcap"), number(dropout_p, "dropout_p")
    scale = None if scale is None else number(scale, "scale")
    deterministic = None if deterministic is None else flag(deterministic, "deterministic")
    flag(causal, "causal"), flag(is_causal, "is_causal"), flag(enable_gqa, "enable_gqa")
    flag(batch_invariant, "batch_invariant")
    gqa, left, right, bottom_right = True, None, None, False
    if sdpa:
        if attn_mask is not None and is_causal:
            raise AttentionError("attn_mask is given together with is_causal=True; only one of the two may be set")
        if attn_mask is not None:
            mask, bias = (attn_mask, None) if attn_mask.dtype == torch.bool else (None, attn_mask)
        causal, gqa = is_causal, enable_gqa
    else:
        packed = cu_seqlens_q is not None
        left, right = check_band(window, align) if packed else check_native(query, key, value, window, align)
        bottom_right = align == "bottom_right"
    if max_k is None:
        max_k = max_q
    added = {
        "mask": mask is not None,
        "bias": bias is not None,
        "ALiBi": alibi_slopes is not None,
        "softcap": softcap != 0.0,
        "dropout": dropout_p > 0.0,
        "sinks": sinks is not None,
    }
    inputs = (query, key, value, bias, alibi_slopes)
    wanted = [t is not None and t.requires_grad for t in inputs]
    if not any(wanted):
        wanted = [t is not None for t in inputs]
    if device is None:
        device = "" if query.device.type == "meta" else query.device
    with _disable_current_modes():
        q, k, v, mask, bias, alibi_slopes = (_meta(t) for t in (query, key, value, mask, bias, alibi_slopes))
        others = tuple(_meta(t) for t in (sinks, q_descale, k_descale, v_descale))
        lengths = (None if t is None else t.to("meta") for t in (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k))
        options = (causal, left, right, bottom_right, softcap, dropout_p, scale, gqa, deterministic, None)
        options += (max_q, max_k, batch_invariant, out_dtype)
        text = require_c().explain(q, k, v, mask, bias, alibi_slopes, *lengths, *others, *options, str(device), wanted)
        call = _call(q, k, v, cu_seqlens_q, max_q, max_k)
    parts = json.loads(text)
    plans = []
    for name in ("forward", "backward"):
        plan = parts[name]
        plan["on_chip"] = tuple((use, size) for use, size in plan["on_chip"])
        plans.append(Plan(**plan))
    return Explanation(
        *plans,
        call=Call(
            **call,
            causal=causal,
            window=(left, right),
            align="bottom_right" if bottom_right else "top_left",
            added=tuple(name for name, is_there in added.items() if is_there),
            batch_invariant=batch_invariant,
        ),
        candidates=tuple(Candidate(*c) for c in parts["considered"]),
        batch_invariant=batch_invariant,
        copies=tuple(Copy("attn_mask" if sdpa and c[0] in ("mask", "bias") else c[0], *c[1:]) for c in parts["copies"]),
    )
