"""Markers of FlashAttention-3, see ``common``."""

from .common import AttentionBwOpBase, AttentionFwOpBase


class FwOp(AttentionFwOpBase):
    NAME = "flash3F"


class BwOp(AttentionBwOpBase):
    NAME = "flash3B"
