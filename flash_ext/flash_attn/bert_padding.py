"""``flash_attn.bert_padding``: from padded batches to packed rows and back, in torch's operators, with gradients.

Masks are (B, L), bool or int, where not 0 is a token. The number of tokens is data, so ``unpad_input`` waits for the
device; attention itself does not.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows ``indices`` (n,) of input (rows, ...): (n, ...)."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """(first_axis_dim, ...), zero but for rows ``indices`` (n,), which are values (n, ...)."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Rows ``indices`` (n,) of input (rows, ...), and input itself, for what goes on beside them."""
    return input.index_select(0, indices), input.view_as(input)


def _packed(hidden_states: Tensor, kept: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens of a padded batch, one sequence behind the other.

    Args:
        hidden_states: (B, L, ...).
        attention_mask: (B, L), where tokens are.
        unused_mask: (B, L), where room is that is packed, too, but not in use.

    Returns:
        rows (n, ...) of both masks; indices (n,) int64 of these among the B L places; cu_seqlens (B + 1,) int32; the
        length of the longest sequence; seqused (B,) int32, tokens of attention_mask in each sequence.
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    return *_packed(hidden_states, kept, lengths), attention_mask.sum(-1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """As ``unpad_input``, where a row of the batch holds several sequences, one behind the other from its first place.

    Args:
        hidden_states: (B, L, ...).
        attention_mask_in_length: (B, L) int, the lengths of a row's sequences, and 0 elsewhere.

    Returns:
        rows (n, ...), indices (n,), cu_seqlens over all sequences (number of them + 1,) int32, the longest length.
    """
    places = torch.arange(attention_mask_in_length.shape[1], device=attention_mask_in_length.device)
    kept = places < attention_mask_in_length.sum(-1, keepdim=True)
    return _packed(hidden_states, kept, attention_mask_in_length[attention_mask_in_length != 0])


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """(batch, seqlen, ...) with rows (n, ...) at places ``indices`` (n,) of the batch seqlen ones, zero elsewhere."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
