"""Markers of kernels that split keys, for AMD's GPUs, see ``common``."""

from .common import AttentionFwOpBase


class FwOp(AttentionFwOpBase):
    NAME = "ck_splitkF"
