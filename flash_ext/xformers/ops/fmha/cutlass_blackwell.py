"""Markers of kernels for Blackwell, written with CUTLASS, see ``common``."""

from .common import AttentionBwOpBase, AttentionFwOpBase


class FwOp(AttentionFwOpBase):
    NAME = "cutlass_blackwellF"


class BwOp(AttentionBwOpBase):
    NAME = "cutlass_blackwellB"
