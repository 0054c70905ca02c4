"""Markers of kernels for AMD's GPUs, see ``common``."""

from .common import AttentionBwOpBase, AttentionFwOpBase


class FwOp(AttentionFwOpBase):
    NAME = "ckF"


class BwOp(AttentionBwOpBase):
    NAME = "ckB"
