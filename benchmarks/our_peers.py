"""flash_ext as a peer of attention.py: its own choice, one backend, or one option; and which peers take e4m3."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from gpu_peers import Peer, padded_peer
from harness import BenchmarkError, load_flash_ext
from shapes import BOOL_MASKS, E4M3, Case, Inputs
from suites import BY_NAME, CUDNN_FP8, DETERMINISTIC, INVARIANT, OURS, PADDED, WIDE
from torch import Tensor


def our_peer(backend: str | None = None, **bits: bool) -> Peer:
    """flash_ext: the drop-in, or the native call for what only that one knows; with --backend only that backend."""
    flash_ext = load_flash_ext()
    try:
        with flash_ext.use_backend(backend) if backend else nullcontext():
            pass
    except flash_ext.AttentionError as error:
        raise BenchmarkError(f"--backend {backend}: {error}.") from None

    def drop_in(case: Case, x: Inputs) -> Tensor:
        gqa = case.hkv != case.h
        sdpa = flash_ext.scaled_dot_product_attention
        return sdpa(x.query, x.key, x.value, x.mask, case.dropout, case.causal, enable_gqa=gqa)

    def native(case: Case, x: Inputs) -> Tensor:
        if case.lengths:
            rows, options = x.packed(), {"causal": case.causal, "max_q": case.sq, **x.named_descales()}
            return flash_ext.attention_varlen(*rows, x.cu_seqlens, **options, **bits).transpose(0, 1)[None]
        masks = {"mask" if case.mask in BOOL_MASKS else "bias": x.mask, "alibi_slopes": x.slopes}
        options = {"window": (case.window, 0) if case.window else None, "softcap": case.softcap}
        more = {"causal": case.causal, "dropout_p": case.dropout, **x.named_descales()}
        return flash_ext.attention(x.query, x.key, x.value, **masks, **options, **more, **bits)

    def run(case: Case, x: Inputs) -> Tensor:
        with flash_ext.use_backend(backend) if backend else nullcontext():  # the graph keeps it for backward
            return native(case, x) if bits or case.beyond_sdpa or x.descales else drop_in(case, x)

    return run


# name -> factory; a name costs nothing until it is asked for
OUR_PEERS: dict[str, Callable[..., Peer]] = {
    OURS: our_peer,
    DETERMINISTIC: partial(our_peer, deterministic=True),
    INVARIANT: partial(our_peer, batch_invariant=True),
    WIDE: partial(our_peer, deterministic=False),  # by the native call, as e4m3 is
    PADDED: lambda backend=None: padded_peer(our_peer(backend)),
    **{name: lambda _, name=name: our_peer(name.removeprefix(f"{OURS}-")) for name in BY_NAME},
}


def given_to(name: str, peer: Peer, dtype: torch.dtype) -> Peer:
    """The peer, or one that says that it takes no e4m3 or nothing else."""
    takes_e4m3 = name == CUDNN_FP8 or (name in OUR_PEERS and name != PADDED)
    takes_others = name not in (CUDNN_FP8, WIDE)
    if takes_e4m3 if dtype == E4M3 else takes_others:
        return peer

    def refuse(case: Case, x: Inputs) -> Tensor:
        raise RuntimeError("takes no e4m3" if dtype == E4M3 else "takes e4m3 only")

    return refuse
