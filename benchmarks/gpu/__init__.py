"""What is measured on a GPU, in stages that a short loan of one is enough for. `scripts/gpu` runs one of them.

`stages` owns what was done and what is left; each other module has the parts of one stage.
"""
