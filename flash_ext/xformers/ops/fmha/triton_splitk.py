"""Markers of kernels that split keys, written in Triton, see ``common``."""

from .common import AttentionFwOpBase


class FwOp(AttentionFwOpBase):
    NAME = "triton_splitkF"
