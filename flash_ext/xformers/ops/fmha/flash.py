"""Markers of FlashAttention-2, see ``common``."""

from .common import AttentionBwOpBase, AttentionFwOpBase


class FwOp(AttentionFwOpBase):
    NAME = "flashF"


class BwOp(AttentionBwOpBase):
    NAME = "flashB"
