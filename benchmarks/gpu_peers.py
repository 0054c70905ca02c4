"""The peers of a GPU: PyTorch's backends, FlexAttention, FlashAttention-3 and -4, and cuDNN's attention of e4m3.

Each is a function of (Case, Inputs) that returns out with autograd, or raises a RuntimeError with the reason why it
cannot serve the case, which becomes the cell's row.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from accuracy import eager_attention
from harness import BenchmarkError
from shapes import BOOL_MASKS, Case, Inputs
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Peer = Callable[[Case, Inputs], Tensor]

MATH_GIB = 4.0  # larger fp32 scores are not asked of the math path, which writes them out several times
# The mask at one score, by the letters of Case.mask_dims
MASK_AT = {
    "1hqk": lambda mask, b, h, q, k: mask[0, h, q, k],
    "11qk": lambda mask, b, h, q, k: mask[0, 0, q, k],
    "b11k": lambda mask, b, h, q, k: mask[b, 0, 0, k],
    "h1k": lambda mask, b, h, q, k: mask[h, 0, k],
    "k": lambda mask, b, h, q, k: mask[k],
}


def sdpa_peer(sdpa: Callable[..., Tensor]) -> Peer:
    """A function with the signature of F.scaled_dot_product_attention; masks as 4 dimensions, which PyTorch wants."""

    def run(case: Case, x: Inputs) -> Tensor:
        if case.beyond_sdpa:
            raise RuntimeError("takes no window, softcap, ALiBi or packed sequences")
        gqa = {"enable_gqa": True} if case.hkv != case.h else {}
        mask = x.mask if x.mask is None else x.mask[(None,) * (4 - x.mask.dim())]
        return sdpa(x.query, x.key, x.value, mask, case.dropout, case.causal, **gqa)

    return run


def _reason(call: Callable[[], Tensor], fallback: str) -> str:
    """Why no kernel took a call: PyTorch tells it in warnings, the last one that is not about a disabled backend."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with suppress(RuntimeError):
            call()
    texts = [str(warning.message).partition(" (Triggered")[0] for warning in told]
    reasons = [t for t in texts if "not used because" not in t and "runtime disabled" not in t]
    return reasons[-1].splitlines()[0] if reasons else fallback


def torch_backend(backend: SDPBackend) -> Peer:
    """PyTorch's attention with one backend allowed."""
    plain = sdpa_peer(F.scaled_dot_product_attention)

    def run(case: Case, x: Inputs) -> Tensor:
        scores_gib = 4 * case.b * case.h * case.sq * case.sk / 2**30
        if backend == SDPBackend.MATH and scores_gib > MATH_GIB:
            raise RuntimeError(f"its scores would take {scores_gib:.0f} GiB")
        with sdpa_kernel(backend):
            try:
                return plain(case, x)
            except RuntimeError as error:
                if "No available kernel" not in str(error):
                    raise
                raise RuntimeError(_reason(lambda: plain(case, x), str(error))) from None

    return run


def eager_peer(attend: Callable[..., Tensor] = eager_attention) -> Peer:
    """Plain tensor operations, every intermediate written out."""
    return lambda case, x: attend(case, x.query, x.key, x.value, x.mask, x.slopes)


def _allow_retained_graphs() -> None:
    """A compiled backward that reuses its saved tensors' memory cannot run twice on one graph; timing it alone does."""
    import torch._functorch.config as functorch  # no attribute of torch until it is imported

    functorch.donated_buffer = False


def compiled_eager_peer() -> Peer:
    """The same under torch.compile, compiled anew for every case."""
    compiled: dict[Case, Callable[..., Tensor]] = {}

    def run(case: Case, x: Inputs) -> Tensor:
        if case not in compiled:
            _allow_retained_graphs()
            torch._dynamo.reset()
            compiled.clear()
            compiled[case] = torch.compile(eager_attention, dynamic=False)
        return compiled[case](case, x.query, x.key, x.value, x.mask, x.slopes)

    return run


def flex_call(case: Case, x: Inputs, flex: Callable[..., Tensor]) -> Callable[[], Tensor]:
    """FlexAttention's form of a case: what changes a score, and which blocks of scores there are."""
    from torch.nn.attention.flex_attention import create_block_mask

    gqa = case.hkv != case.h
    if case.lengths:
        lengths, causal = torch.tensor(case.lengths, device=x.query.device), case.causal
        document = torch.arange(case.b, device=x.query.device).repeat_interleave(lengths)

        def within(b, h, q, k):
            same = document[q] == document[k]
            return same & (q >= k) if causal else same

        create = torch.compile(create_block_mask) if x.query.is_cuda else create_block_mask  # eager writes all pairs
        block_mask = create(within, None, None, case.rows, case.rows, device=x.query.device)
        return lambda: flex(x.query, x.key, x.value, enable_gqa=gqa, block_mask=block_mask)
    if case.dropout:
        raise RuntimeError("takes no dropout")
    mask, slopes, softcap, window = x.mask, x.slopes, case.softcap, case.window or case.sk
    at = MASK_AT.get(case.mask_dims)

    def soft(score, b, h, q, k):
        return softcap * torch.tanh(score / softcap)

    def biased(score, b, h, q, k):
        return score + at(mask, b, h, q, k)

    def sloped(score, b, h, q, k):
        return score - slopes[h] * (q - k).abs()

    def seen(b, h, q, k):
        return (q >= k) & (q - k <= window)

    def allowed(b, h, q, k):
        return at(mask, b, h, q, k)

    has = {soft: bool(softcap), biased: case.mask.startswith("float"), sloped: case.alibi}
    score_mods = [mod for mod, used in has.items() if used]
    if len(score_mods) > 1 or (case.causal and case.mask in BOOL_MASKS):
        raise RuntimeError("this combination is not written for FlexAttention here")
    options = {"score_mod": score_mods[0]} if score_mods else {}
    if case.causal or case.mask in BOOL_MASKS:
        batches = case.b if case.mask_dims == "b11k" else None
        keep = seen if case.causal else allowed
        options["block_mask"] = create_block_mask(keep, batches, None, case.sq, case.sk, device=x.query.device)
    return lambda: flex(x.query, x.key, x.value, enable_gqa=gqa, **options)


def flex_peer() -> Peer:
    """FlexAttention under torch.compile, compiled anew for every case; its block mask is not part of the time."""
    from torch.nn.attention.flex_attention import flex_attention

    calls: dict[int, Callable[[], Tensor]] = {}

    def run(case: Case, x: Inputs) -> Tensor:
        if id(x) not in calls:
            _allow_retained_graphs()
            torch._dynamo.reset()
            calls.clear()
            calls[id(x)] = flex_call(case, x, torch.compile(flex_attention, dynamic=False))
        return calls[id(x)]()

    return run


def flash_attention_peer(name: str, module: str) -> Peer:
    """FlashAttention's call of version 3 or 4; layout (b, s, h, d), diagonal at the bottom right."""
    try:
        attend = import_module(module).flash_attn_func
    except Exception as error:  # whatever a package raises whose own needs are of other versions
        raise BenchmarkError(f"The peer {name} cannot be imported ({error}).") from None

    def run(case: Case, x: Inputs) -> Tensor:
        if case.mask != "none" or case.dropout or case.alibi or (case.causal and case.sq != case.sk):
            raise RuntimeError("takes no mask, dropout or ALiBi, and no top-left diagonal")
        if case.lengths:
            raise RuntimeError(f"its call for packed sequences is the peer {name}-varlen")
        options: dict[str, Any] = {"window_size": (case.window, 0)} if case.window else {}
        query, key, value = (t.transpose(1, 2) for t in (x.query, x.key, x.value))
        out = attend(query, key, value, causal=case.causal, softcap=case.softcap, **options)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return run


def padded_peer(dense: Peer) -> Peer:
    """A dense peer on packed sequences that shapes.pad padded; to pad them is no part of the time."""

    def run(case: Case, x: Inputs) -> Tensor:
        if not case.lengths:
            raise RuntimeError("pads packed sequences only")
        if x.query.shape[2] != case.sq:
            gib = case.b * case.h * case.sq * case.d * x.query.element_size() / 2**30
            raise RuntimeError(f"padded, its query would take {gib:.0f} GiB")
        return dense(replace(case, lengths=()), x)

    return run


def torch_varlen_peer(repeated: bool) -> Peer:
    """PyTorch's attention of packed sequences, causal from torch 2.11 on by a window.

    Grouped heads are either its own or, where this torch has none, key heads repeated within the time.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise BenchmarkError(f"The peer torch-varlen cannot be imported ({error}).") from None
    known = inspect.signature(varlen_attn).parameters

    def run(case: Case, x: Inputs) -> Tensor:
        grouped = case.hkv != case.h
        if not case.lengths or not x.query.is_cuda:
            raise RuntimeError("takes packed sequences on a GPU only")
        if repeated != (grouped and "enable_gqa" not in known):
            why = "takes only grouped heads, and only where torch has none of its own"
            raise RuntimeError(why if repeated else f"has no grouped heads in torch {torch.__version__}")
        query, key, value = x.packed()
        if repeated:
            key, value = (t.repeat_interleave(case.h // case.hkv, dim=1) for t in (key, value))
        options = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
        options = {**(options if case.causal else {}), **({"enable_gqa": True} if grouped and not repeated else {})}
        out = varlen_attn(query, key, value, x.cu_seqlens, x.cu_seqlens, case.sq, case.sq, **options)
        return out.transpose(0, 1)[None]

    return run


def flash_attention_varlen_peer(name: str, module: str) -> Peer:
    """FlashAttention's call for packed sequences, of version 3 or 4."""
    try:
        attend = import_module(module).flash_attn_varlen_func
    except Exception as error:  # whatever a package raises whose own needs are of other versions
        raise BenchmarkError(f"The peer {name} cannot be imported ({error}).") from None

    def run(case: Case, x: Inputs) -> Tensor:
        if not case.lengths:
            raise RuntimeError("takes packed sequences only")
        rows = {"cu_seqlens_q": x.cu_seqlens, "cu_seqlens_k": x.cu_seqlens}
        out = attend(*x.packed(), **rows, max_seqlen_q=case.sq, max_seqlen_k=case.sq, causal=case.causal)
        return (out[0] if isinstance(out, tuple) else out).transpose(0, 1)[None]

    return run


def cudnn_fp8_call(cudnn: ModuleType, case: Case, x: Inputs) -> Callable[[], Tensor]:
    """cuDNN's forward of e4m3 tensors as one built graph, through the package nvidia-cudnn-frontend.

    It is there for its time. Its descales are one a tensor, here that of the first head, and out is e4m3, not scaled:
    these are not the numbers of the case, and no error is told.
    """
    device, e4m3, float32 = x.query.device, cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
    handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
    types = {"io_data_type": e4m3, "intermediate_data_type": float32, "compute_data_type": float32}
    graph = cudnn.pygraph(**types, handle=handle)
    given: dict[Any, Tensor] = {}  # by the graph's tensor

    def taken(tensor: Tensor, data_type: Any) -> Any:
        node = graph.tensor(dim=list(tensor.shape), stride=list(tensor.stride()), data_type=data_type)
        given[node] = tensor
        return node

    def factor(number: Tensor) -> Any:
        return taken(number.detach().clone().view(1, 1, 1, 1), float32)

    one = torch.ones((), device=device)
    tensors = {name: taken(t, e4m3) for name, t in (("q", x.query), ("k", x.key), ("v", x.value))}
    names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    factors = dict(zip(names, map(factor, (*(d.flatten()[0] for d in x.descales), one, one, one)), strict=True))
    options = {"attn_scale": 1 / math.sqrt(case.d), "use_causal_mask": case.causal, "is_inference": False}
    out, stats, *largest = graph.sdpa_fp8(**tensors, **factors, **options)
    shape = (case.b, case.h, case.sq)
    made = [(out, torch.float8_e4m3fn, e4m3, (*shape, case.dv)), (stats, torch.float32, float32, (*shape, 1))]
    made += [(node, torch.float32, float32, (1, 1, 1, 1)) for node in largest]
    for node, _, data_type, sizes in made:
        strides = [math.prod(sizes[i + 1 :]) for i in range(4)]
        node.set_output(True).set_dim(list(sizes)).set_stride(strides).set_data_type(data_type)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    scratch = max(graph.get_workspace_size(), 1)

    def call() -> Tensor:
        results = {node: torch.empty(sizes, dtype=dtype, device=device) for node, dtype, _, sizes in made}
        workspace = torch.empty(scratch, dtype=torch.uint8, device=device)
        graph.execute({**given, **results}, workspace, handle=handle)
        return results[out]

    return call


def cudnn_fp8_peer() -> Peer:
    """cuDNN's forward of e4m3 tensors, its graph built anew for every case, which is not part of the time."""
    try:
        cudnn = import_module("cudnn")
    except Exception as error:  # also where it finds no library of its own
        raise BenchmarkError(f"The peer cudnn-fp8 cannot be imported ({error}).") from None
    calls: list[tuple[Inputs, Callable[[], Tensor]]] = []  # of the latest inputs

    def run(case: Case, x: Inputs) -> Tensor:
        if case.mask != "none" or case.dropout or case.beyond_sdpa:
            raise RuntimeError("is asked for no mask, dropout, window, softcap, ALiBi or packed sequences here")
        if not x.query.is_cuda:
            raise RuntimeError("runs on a GPU only")
        if not calls or calls[0][0] is not x:
            calls[:] = [(x, cudnn_fp8_call(cudnn, case, x))]
        return calls[0][1]()

    return run


# name -> factory; a name costs nothing until it is asked for
GPU_PEERS: dict[str, Callable[[], Peer]] = {
    "torch-flash": lambda: torch_backend(SDPBackend.FLASH_ATTENTION),
    "torch-cudnn": lambda: torch_backend(SDPBackend.CUDNN_ATTENTION),
    "torch-efficient": lambda: torch_backend(SDPBackend.EFFICIENT_ATTENTION),
    "torch-math": lambda: torch_backend(SDPBackend.MATH),
    "compiled-eager": compiled_eager_peer,
    "flex": flex_peer,
    "fa3": partial(flash_attention_peer, "fa3", "flash_attn_interface"),
    "fa4": partial(flash_attention_peer, "fa4", "flash_attn.cute"),
    "cudnn-fp8": cudnn_fp8_peer,
    "torch-varlen": partial(torch_varlen_peer, repeated=False),
    "torch-varlen-repeated": partial(torch_varlen_peer, repeated=True),
    "fa3-varlen": partial(flash_attention_varlen_peer, "fa3-varlen", "flash_attn_interface"),
    "fa4-varlen": partial(flash_attention_varlen_peer, "fa4-varlen", "flash_attn.cute"),
}
# What may be missing: a suite goes without it
OPTIONAL = ("fa3", "fa4", "cudnn-fp8", "torch-varlen", "torch-varlen-repeated", "fa3-varlen", "fa4-varlen")
