"""The operators on DTensors: each rank computes its own batch elements and heads, without communication.

Along each dimension of the mesh the result is sharded in one leading dimension (batch or heads), or replicated. The
first of query, key and value (then mask and bias) that is sharded so decides; backward follows its forward's result.
What has that dimension is sharded alike; what is broadcast along it, as one key head, is replicated, and its gradient
is a partial sum. Key heads that do not divide over the ranks, lengths and head dims are gathered first: sequences stay
whole.

Packed sequences are sharded in their heads alone: their rows stay whole, and so do the tensors of their lengths. So are
caches, which are written to where they lie: query and both caches come sharded in heads alike, or whole.

Dropout follows torch's random operators on DTensors: replicas agree, shards have maps of their own, and a seed
reproduces them; the map is not that of the unsharded call. Each shard's random state is the call's with the shard's
number added, so it comes back sharded. A random state that a caller gives whole means the map of the whole, so all is
gathered.

PyTorch's ``context_parallel`` is another matter: the rows of its DTensors may stand in another order than the sequence.
While its handlers are in DTensor's dispatch, calls on shards of rows go to ``distributed/pytorch_context.py``.

Called by DTensor's dispatch, below autograd. Imported when ``torch.distributed.tensor`` is.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Placement, Replicate, Shard

from flash_ext.ops import GRADIENTS

_ops = torch.ops.flash_ext
# DTensor's dispatch has a handler of it while PyTorch's context_parallel is entered, and at no other time.
_HANDLED = torch.ops.aten._scaled_dot_product_flash_attention.default
# Dimensions that a tensor has less than the scores (batch..., heads, queries, keys).
_MISSING = dict.fromkeys(("query", "key", "value", "mask", "bias", "out", "grad_out"), 0)
_MISSING |= {"lse": 1, "grad_lse": 1, "alibi_slopes": 2, "sinks": 2}
_MISSING |= {"q_descale": 2, "k_descale": 2, "v_descale": 2}  # 1 of those with a number for each row
_DESCALES = ("q_descale", "k_descale", "v_descale")
_INPUTS = ("query", "key", "value", "mask", "bias")
_RESULTS = ("out", "lse", "grad_out", "grad_lse")
_ROWS = (Shard(2),)  # how PyTorch's context_parallel places query, key and value, (batch, heads, rows, columns)
_LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")


def _moved(tensor: DTensor, wanted: list[Placement]) -> Tensor:
    """This rank's part of it; e4m3 as bytes, because Gloo knows no such numbers."""
    if list(tensor.placements) == wanted:
        return tensor.to_local()
    tensor = tensor.detach()
    if tensor.dtype != torch.float8_e4m3fn:
        return tensor.redistribute(tensor.device_mesh, wanted).to_local()
    parts = DTensor.from_local(
        tensor.to_local().view(torch.uint8), tensor.device_mesh, tensor.placements, run_check=False,
        shape=tensor.shape, stride=tensor.stride(),
    )  # fmt: skip
    return parts.redistribute(tensor.device_mesh, wanted).to_local().view(tensor.dtype)


class _Call:
    """The arguments of one call, by name, and how its result is placed."""

    def __init__(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        self.func = func
        names = [argument.name for argument in func._schema.arguments]
        self.values = dict(zip(names, args, strict=False)) | kwargs
        self.tensors = {name: self.values[name] for name in _MISSING if self.values.get(name) is not None}
        self.mesh: DeviceMesh = next(t for t in self.values.values() if isinstance(t, DTensor)).device_mesh
        self.packed = self.values.get("cu_seqlens_q") is not None
        self.rank = max(self.tensors[name].dim() for name in ("query", "key", "value"))
        self.drops = self.values.get("dropout_p", 0.0) > 0
        self._check()
        self.balance = self._balance()
        self.leading = [self._whole_size(dim) for dim in range(self.rank - 2)]
        deciding = ("out",) if "out" in self.tensors else _INPUTS
        self.placements: list[Placement] = [Replicate()] * self.mesh.ndim
        for mesh_dim in range(self.mesh.ndim):
            for dim in filter(None.__ne__, (self._sharded_dim(name, mesh_dim) for name in deciding)):
                before, self.placements[mesh_dim] = self.placements[mesh_dim], Shard(dim)
                if self._heads_divide():
                    break
                self.placements[mesh_dim] = before
        self._follow_random_state()

    def _check(self) -> None:
        implicit = getattr(DTensor._op_dispatcher, "_allow_implicit_replication", False)
        for name, tensor in self.tensors.items():
            if not isinstance(tensor, DTensor) and not implicit and tensor.numel() > 0:
                raise RuntimeError(
                    f"{name} is a torch.Tensor beside DTensors; distribute it with torch.distributed.tensor first"
                )
            if isinstance(tensor, DTensor) and tensor.device_mesh != self.mesh:
                raise RuntimeError(f"{name} is on {tensor.device_mesh}, but others are on {self.mesh}")

    def _balance(self) -> str | None:
        """Which rows a shard of PyTorch's context_parallel has, as ``layout.py`` names it; None: it is no such shard.

        Backward knows it from what forward returned: out is in rows, and a random state that is sharded means zigzag.
        """
        inputs = [self.tensors[name] for name in ("query", "key", "value")]
        in_rows = [isinstance(t, DTensor) and Shard(2) in t.placements for t in inputs]
        if self.packed or not any(in_rows):
            return None
        fits = self.mesh.ndim == 1 and all(in_rows) and all(t.dim() == 4 for t in inputs)
        if "out" in self.tensors:
            out, state = self.tensors["out"], self.values["rng_state"]
            if not fits or not isinstance(out, DTensor) or tuple(out.placements) != _ROWS:
                return None
            return "zigzag" if isinstance(state, DTensor) and Shard(0) in state.placements else "contiguous"
        # NOTE: private, as all that says so is.
        if _HANDLED not in DTensor._op_dispatcher._custom_op_handlers:
            return None
        if not fits:
            raise RuntimeError(
                "torch's context_parallel takes query, key and value of 4 dimensions, all three sharded in dimension 2 "
                f"of a mesh of one; these have {', '.join(str(t.dim()) for t in inputs)} dimensions"
            )
        if inputs[0].dtype == torch.float8_e4m3fn:
            raise RuntimeError(f"query is of {inputs[0].dtype}, which torch's context_parallel does not take")
        from torch.distributed.tensor.experimental._attention import _cp_options

        return "zigzag" if _cp_options.enable_load_balance else "contiguous"

    def _dim_of(self, name: str, dim: int) -> int | None:
        """Where the tensor holds leading dimension ``dim`` of the result; None where it is broadcast along it."""
        tensor = self.tensors[name]
        own = dim + self._first_dim(name)
        return own if own >= 0 and tensor.shape[own] != 1 else None

    def _first_dim(self, name: str) -> int:
        """Where the tensor would hold the first of the result's leading dimensions; negative: nowhere."""
        dims = self.tensors[name].dim()
        if not self.packed:
            per_row = name in _DESCALES and dims == self.tensors[_INPUTS[_DESCALES.index(name)]].dim() - 1
            return dims - self.rank + _MISSING[name] - per_row
        # The one leading dimension is the heads: query (rows, heads, cols), lse (heads, rows), mask (.., heads, L, S).
        of_heads = {"lse": 0, "grad_lse": 0, "alibi_slopes": dims - 1, "sinks": 0}
        of_heads |= dict.fromkeys(_DESCALES, 1 if dims == 3 else dims - 1)
        return (of_heads | {"mask": dims - 3, "bias": dims - 3}).get(name, 1)

    def _whole_size(self, dim: int) -> int:
        names = ("query",) if self.values.get("gqa", False) and dim == self.rank - 3 else ("query", "key", "value")
        for name in names:
            own = self._dim_of(name, dim)
            if own is not None:
                return self.tensors[name].shape[own]
        return 1

    def _sharded_dim(self, name: str, mesh_dim: int) -> int | None:
        """The leading dimension of the result in which this tensor is sharded already."""
        tensor = self.tensors.get(name)
        placement = tensor.placements[mesh_dim] if isinstance(tensor, DTensor) else None
        if type(placement) is not Shard or tensor.shape[placement.dim] == 1:
            return None
        dim = placement.dim - self._first_dim(name)
        return dim if 0 <= dim < self.rank - 2 and self.leading[dim] != 1 else None

    def _heads_divide(self) -> bool:
        """Whether each rank's heads of query read the heads of key and value that it has."""
        heads = self.rank - 3
        ranks = 1
        for mesh_dim, placement in enumerate(self.placements):
            ranks *= self.mesh.size(mesh_dim) if placement == Shard(heads) else 1
        if ranks == 1:
            return True
        whole = self.leading[heads]
        counts = [
            self.tensors[name].shape[own] for name in ("key", "value") if (own := self._dim_of(name, heads)) is not None
        ]
        return all(count == whole or (count % ranks == 0 and whole % ranks == 0) for count in counts)

    def _follow_random_state(self) -> None:
        state = self.values.get("rng_state")
        if not self.drops or state is None or self.balance is not None:
            return
        is_sharded = [isinstance(p, Shard) for p in state.placements] if isinstance(state, DTensor) else []
        if not any(is_sharded):
            self.placements = [Replicate()] * self.mesh.ndim
        elif is_sharded != [isinstance(p, Shard) for p in self.placements]:
            raise RuntimeError(
                f"rng_state is placed as {state.placements}, of another call than this one, which is placed as "
                f"{tuple(self.placements)}"
            )

    def placements_of(self, name: str, broadcast: type[Placement] = Replicate) -> list[Placement]:
        """Of an argument; ``broadcast`` is what it is where the result is sharded and it is not."""
        result: list[Placement] = []
        for placement in self.placements:
            own = self._dim_of(name, placement.dim) if isinstance(placement, Shard) else None
            result.append(
                Shard(own) if own is not None else broadcast() if isinstance(placement, Shard) else Replicate()
            )
        return result

    def local(self) -> dict[str, Any]:
        """The arguments of this rank."""
        values = dict(self.values)
        for name, tensor in self.tensors.items():
            if not isinstance(tensor, DTensor):
                tensor = DTensor.from_local(tensor, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
            wanted = self.placements_of(name)
            values[name] = _moved(tensor, wanted)
        for name in _LENGTHS:
            if isinstance(values.get(name), DTensor):
                values[name] = values[name].redistribute(self.mesh, [Replicate()] * self.mesh.ndim).to_local()
        state = values.get("rng_state")
        if isinstance(state, DTensor):
            values["rng_state"] = state.to_local()
        return values

    def rows(self) -> dict[str, Any]:
        """The arguments of this rank where ``balance`` says which rows it has."""
        values = dict(self.values)
        for name in (*_INPUTS[:3], *_RESULTS):
            tensor = values.get(name)
            if isinstance(tensor, DTensor):
                tensor = tensor if tuple(tensor.placements) == _ROWS else tensor.redistribute(self.mesh, _ROWS)
                values[name] = tensor.to_local()
        if isinstance(values.get("rng_state"), DTensor):
            values["rng_state"] = values["rng_state"].to_local()
        return values

    def whole_sizes(self, out: Tensor) -> tuple[list[int], list[int]]:
        """Of out and lse, by the sizes of this rank's out."""
        if self.packed:
            return [out.shape[0], *self.leading, out.shape[2]], [*self.leading, out.shape[0]]
        return [*self.leading, *out.shape[-2:]], [*self.leading, out.shape[-2]]

    def draw(self, like: Tensor) -> DTensor:
        """The random state of the call's shards: the first rank's, and the number of the shard."""
        state = torch.empty(2, dtype=torch.int64, device=like.device).random_()
        if type(state) is Tensor:  # not while a graph is traced, where the ranks' seeds must agree
            state = DTensor.from_local(state, self.mesh, [Replicate()] * self.mesh.ndim, run_check=True).to_local()
        shard = 0
        for mesh_dim, placement in enumerate(self.placements):
            if isinstance(placement, Shard):
                shard = shard * self.mesh.size(mesh_dim) + self.mesh.get_local_rank(mesh_dim)
        local = torch.stack((state[0], state[1] + shard))
        return self.wrap_state(local)

    def wrap_state(self, local: Tensor) -> DTensor:
        is_sharded = [isinstance(p, Shard) or self.balance == "zigzag" for p in self.placements]
        placements = [Shard(0) if sharded else Replicate() for sharded in is_sharded]
        return DTensor.from_local(local, self.mesh, placements, run_check=False)

    def wrap(self, local: Tensor, placements: list[Placement], sizes: list[int]) -> DTensor:
        """A result of this rank as a part of a dense tensor of ``sizes`` in the same order of strides."""
        strides, stride = [0] * len(sizes), 1
        for dim in sorted(range(len(sizes)), key=lambda d: (local.stride(d), -d)):
            strides[dim] = stride
            stride *= max(sizes[dim], 1)
        return DTensor.from_local(
            local, self.mesh, placements, run_check=False, shape=torch.Size(sizes), stride=tuple(strides)
        )

    def replicated(self, local: Tensor) -> DTensor:
        return self.wrap(local, [Replicate()] * self.mesh.ndim, list(local.shape))


def _forward(cls: Any, func: Any, types: Any, args: tuple, kwargs: dict[str, Any] | None = None) -> tuple[Tensor, ...]:
    with torch.no_grad():
        call = _Call(func, args, kwargs or {})
        if call.balance is not None:
            return _forward_of_rows(call)
        values = call.local()
        draws = call.drops and "rng_state" not in values
        if draws:
            drawn = call.draw(values["query"])
            func, values["rng_state"] = _ops.attention_with_rng_state.default, drawn.to_local()
        out, lse, *state = func(**values)
        out_sizes, lse_sizes = call.whole_sizes(out)
        # Of packed sequences the placements, which are of heads, stand at another dimension of out.
        shards = [Shard(1) if call.packed and isinstance(p, Shard) else p for p in call.placements]
        results = [call.wrap(out, shards, out_sizes)]
        if values.get("return_lse", False):
            results.append(call.wrap(lse, call.placements, lse_sizes))
        else:
            results.append(call.replicated(lse))
        if draws:
            results.append(drawn)
        elif state:
            results.append(call.replicated(*state))
        return tuple(results)


def _forward_of_rows(call: _Call) -> tuple[Tensor, ...]:
    from flash_ext.distributed import pytorch_context

    values = call.rows()
    drawn = call.draw(values["query"]) if call.drops and "rng_state" not in values else None
    state = None if not call.drops else values["rng_state"] if drawn is None else drawn.to_local()
    out, lse = pytorch_context.forward(values, state, call.mesh, call.balance)
    sizes = [*call.leading, call.tensors["query"].shape[2]]
    results = [call.wrap(out, list(_ROWS), [*sizes, out.shape[3]])]
    results.append(
        call.wrap(lse, list(_ROWS), sizes) if values.get("return_lse", False) else call.replicated(lse.new_empty(0))
    )
    if call.func is _ops.attention.default:
        results.append(drawn if drawn is not None else call.wrap_state(lse.new_empty(0, dtype=torch.int64)))
    return tuple(results)


def _backward_of_rows(call: _Call) -> tuple[Tensor, ...]:
    from flash_ext.distributed import pytorch_context

    values = call.rows()
    wanted = call.values.get("grad_mask", [True] * len(GRADIENTS))
    state = values["rng_state"] if call.drops else None
    grads = pytorch_context.backward(values, state, call.mesh, call.balance, wanted)
    wrapped = [
        call.replicated(values["query"].new_empty(0)) if grad is None
        else call.wrap(grad, list(_ROWS), list(call.tensors[name].shape))
        for grad, name in zip(grads, GRADIENTS[:3], strict=True)
    ]  # fmt: skip
    return *wrapped, *(call.replicated(values["query"].new_empty(0)) for _ in GRADIENTS[3:])


def _quantize_fp8(cls: Any, func: Any, types: Any, args: tuple, kwargs: dict[str, Any] | None = None) -> Tensor:
    x, descale = args  # of as many dimensions, as the function of Python has them
    with torch.no_grad():
        kept = [p if type(p) is Shard else Replicate() for p in x.placements]
        alike = [p if isinstance(p, Shard) and descale.shape[p.dim] != 1 else Replicate() for p in kept]
        local = func(*(t.detach().redistribute(x.device_mesh, p).to_local() for t, p in ((x, kept), (descale, alike))))
        return DTensor.from_local(local, x.device_mesh, kept, run_check=False, shape=x.shape, stride=x.stride())


def _draw_rng_state(cls: Any, func: Any, types: Any, args: tuple, kwargs: dict[str, Any] | None = None) -> DTensor:
    with torch.no_grad():
        call = _Call(func, args, kwargs or {})
        return call.draw(next(t for t in call.tensors.values() if isinstance(t, DTensor)).to_local())


def _backward(cls: Any, func: Any, types: Any, args: tuple, kwargs: dict[str, Any] | None = None) -> tuple[Tensor, ...]:
    differentiable = torch.is_grad_enabled()  # create_graph=True
    with torch.no_grad():
        call = _Call(func, args, kwargs or {})
        if call.balance is not None:
            if differentiable:
                raise RuntimeError("attention in torch's context_parallel has no second derivative (create_graph=True)")
            return _backward_of_rows(call)
        grads = func(**call.local())
        wanted = call.values.get("grad_mask", [True] * len(GRADIENTS))
        results = []
        for grad, name, want in zip(grads, GRADIENTS, wanted, strict=True):
            if want and name in call.tensors:
                sizes = list(call.tensors[name].shape)
                results.append(call.wrap(grad, call.placements_of(name, broadcast=Partial), sizes))
            else:
                results.append(call.replicated(grad))
        return tuple(results)


def _sinks_gradient(cls: Any, func: Any, types: Any, args: tuple, kwargs: dict[str, Any] | None = None) -> Tensor:
    grad_out, grad_lse, out, lse, sinks = args
    packed = (kwargs or {}).get("packed", False)
    heads = 1 if packed else out.dim() - 3
    with torch.no_grad():
        mesh, placements = out.device_mesh, list(out.placements)
        of_lse = [Shard(0) if packed and isinstance(p, Shard) else p for p in placements]
        own = [p.dim - heads + sinks.dim() - 1 if isinstance(p, Shard) else -1 for p in placements]
        of_sinks = [Shard(dim) if dim >= 0 and sinks.shape[dim] != 1 else Replicate() for dim in own]
        pairs = zip(placements, of_sinks, strict=True)
        result = [Partial() if isinstance(p, Shard) and q == Replicate() else q for p, q in pairs]

        def local(tensor: Tensor | None, wanted: list[Placement]) -> Tensor | None:
            return tensor.detach().redistribute(mesh, wanted).to_local() if isinstance(tensor, DTensor) else tensor

        parts = (local(grad_out, placements), local(grad_lse, of_lse), out.to_local(), local(lse, of_lse))
        grad = func(*parts, local(sinks, of_sinks), **(kwargs or {}))
        return DTensor.from_local(grad, mesh, result, run_check=False)


def _dropout_mask(cls: Any, func: Any, types: Any, args: tuple, kwargs: dict[str, Any] | None = None) -> Tensor:
    state, *rest = args
    if any(isinstance(p, Shard) for p in state.placements):
        raise RuntimeError(
            f"rng_state is placed as {state.placements}: each shard has a map of its own; call dropout_mask with its "
            "to_local()"
        )
    with torch.no_grad():
        whole = [Replicate()] * state.device_mesh.ndim
        mask = func(state.redistribute(state.device_mesh, whole).to_local(), *rest, **(kwargs or {}))
        return DTensor.from_local(mask, state.device_mesh, whole, run_check=False)


# Where attention_with_cache has heads; its other tensors are whole.
_CACHE_HEADS = dict.fromkeys(("query", "key_cache", "value_cache", "key", "value"), 2)
_CACHE_HEADS |= {"k_descale": 1, "v_descale": 1, "alibi_slopes": -1, "sinks": -1}


def _with_cache(cls: Any, func: Any, types: Any, args: tuple, kwargs: dict[str, Any] | None = None) -> tuple:
    names = [argument.name for argument in func._schema.arguments]
    values = dict(zip(names, args, strict=False)) | (kwargs or {})
    mesh: DeviceMesh = next(t for t in values.values() if isinstance(t, DTensor)).device_mesh
    for name in _CACHE_HEADS:
        if isinstance(values.get(name), Tensor) and not isinstance(values[name], DTensor):
            raise RuntimeError(
                f"{name} is a torch.Tensor beside DTensors; distribute it with torch.distributed.tensor first"
            )
    deciding = [values[name] for name in ("query", "key_cache", "value_cache")]
    first = tuple(deciding[0].placements)
    ranks = math.prod(mesh.size(i) for i, placement in enumerate(first) if placement == Shard(2))
    if (
        any(tuple(t.placements) != first or t.shape[2] % ranks for t in deciding)
        or any(placement not in (Shard(2), Replicate()) for placement in first)
    ):  # fmt: skip
        raise RuntimeError(
            f"query, key_cache and value_cache are placed as {', '.join(str(tuple(t.placements)) for t in deciding)}; "
            "attention_with_cache takes them alike, replicated or sharded in their heads, dimension 2, in equal parts"
        )

    def local(name: str, value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        own = [
            Shard(_CACHE_HEADS[name] % value.dim()) if name in _CACHE_HEADS and isinstance(p, Shard) else Replicate()
            for p in first
        ]
        return value.redistribute(mesh, own).to_local()

    with torch.no_grad():
        out, lse = func(**{name: local(name, value) for name, value in values.items()})
        of_lse = [Shard(1) if isinstance(p, Shard) and lse.dim() > 1 else Replicate() for p in first]
        return (
            DTensor.from_local(out, mesh, first, run_check=False),
            DTensor.from_local(lse, mesh, of_lse, run_check=False),
        )


def register(library: torch.library.Library) -> None:
    """Called when ``torch.distributed.tensor`` has been imported; again where flash_ext is imported again."""
    for name, rule in (
        ("draw_rng_state", _draw_rng_state),
        ("attention", _forward),
        ("attention_with_rng_state", _forward),
        ("attention_backward", _backward),
        ("attention_with_cache", _with_cache),
        ("sinks_gradient", _sinks_gradient),
        ("dropout_mask", _dropout_mask),
        ("quantize_fp8", _quantize_fp8),
    ):
        torch.library.register_torch_dispatch(f"flash_ext::{name}", DTensor, rule, lib=library)
