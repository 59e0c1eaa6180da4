"""Figures of Clover's paper (Xiao et al., arXiv 2405.00263), for the tables beside ours.

Its targets are models of 7 B ("small") and over 100 B that nobody else has; a step drafts a tree of 4 tokens.
"""

TOP_5_OVER_MEDUSA = (11.7, 21.7, 26.4)
"""Percentage points of top-5 accuracy by place: the losses below, added up."""
LOSSES = {
    "without attention decoder": (4.8, 9.0, 11.5),
    "nor regression": (2.6, 4.6, 6.0),
    "medusa": (4.3, 8.1, 8.9),
}
"""Percentage points of top-5 accuracy that each step of the ablation loses against the one before it."""
BLOCKS = {
    "clover": (4.9, 9.0, 9.4),
    "block of attention alone": (1.9, 4.4, 5.1),
    "block of an MLP alone": (1.0, 1.2, 0.7),
}
"""Percentage points that forms of the augmenting block gain over having none."""
BATCH_SIZES = (4, 8, 16, 24, 32, 48)
TOKENS_PER_S = {
    "clover": (232.2, 411.3, 673.3, 988.4, 1137.7, 1462.8),
    "medusa": (187.6, 342.4, 645.2, 786.8, 974.4, 1333.2),
    "plain": (121.5, 233.5, 428.5, 591.6, 1202.4, 1874.0),
}
"""Of the 7 B model on mathematics, by batch size."""
