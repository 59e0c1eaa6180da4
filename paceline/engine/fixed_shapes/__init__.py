"""Passes of fixed shapes, for devices on which launching a kernel costs more than padding a few rows.

A pass is padded to a block of rows and queries, and everything it needs to know lies in one small tensor. So a shape's
kernels are recorded once and replayed, and a draft's steps follow each other without a word from the host.
"""

from paceline.engine.fixed_shapes.passes import BlockPasses

__all__ = ["BlockPasses"]
