"""Experts forward over the handles of one window."""

from dynaexq.kernels.base import ExpertsCall, ExpertsKernel, LayerFunctions, VersionMemory, make_kernel

__all__ = ["ExpertsCall", "ExpertsKernel", "LayerFunctions", "VersionMemory", "make_kernel"]
