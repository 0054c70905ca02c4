"""What programs pass as ``op``: names of xformers' kernels. They choose nothing: flash_ext chooses its kernel."""

from __future__ import annotations


class AttentionOpBase:
    """A marker, never called; ``NAME`` is for messages."""

    NAME = ""


class AttentionFwOpBase(AttentionOpBase):
    """Of a forward."""


class AttentionBwOpBase(AttentionOpBase):
    """Of a backward."""


AttentionOp = tuple[type[AttentionFwOpBase] | None, type[AttentionBwOpBase] | None]
