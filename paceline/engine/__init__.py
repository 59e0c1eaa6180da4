"""The model engine, which imports torch.

`interfaces` is the ground. `model` reads a checkpoint, `cache` holds keys and values by sequence, `attention` reads
them, `runner` makes one packed pass over the rows of a group, `sampling` turns logits into choices.
"""
