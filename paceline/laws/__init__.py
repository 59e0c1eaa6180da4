"""Laws of drafts, fitted to measured points: how acceptance grows with training and depth, and what pays when.

After Scylla (arXiv 2505.07858), whose laws are of the logarithm; its constants are of other machines and are not used.
"""
