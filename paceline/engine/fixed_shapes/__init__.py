"""Passes of fixed shapes, for devices on which launching a kernel costs more than padding a few rows.

A pass is padded to a block of rows and queries, and one small tensor holds all that describes it. So the kernels of a
shape are recorded once and replayed, and the steps of a draft follow each other without the host.
"""

from paceline.engine.fixed_shapes.passes import BlockPasses

__all__ = ["BlockPasses"]
