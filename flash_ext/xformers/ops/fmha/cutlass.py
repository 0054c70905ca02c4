"""Markers of kernels written with CUTLASS, see ``common``."""

from .common import AttentionBwOpBase, AttentionFwOpBase


class FwOp(AttentionFwOpBase):
    NAME = "cutlassF"


class BwOp(AttentionBwOpBase):
    NAME = "cutlassB"
