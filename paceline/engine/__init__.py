"""The model engine: the only part of the shared library that imports torch.

`loader` reads a checkpoint, `kv_pool` holds keys and values by sequence, `attention` reads them, `runner` makes one
packed pass over the rows of a group, `sampling` turns logits into choices, `worker` gives it all one thread.
"""
