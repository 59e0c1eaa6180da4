"""The model engine, which imports torch.

`interfaces` says what the parts ask of each other. `model` reads a checkpoint, `cache` holds keys and values,
`attention` reads them, `runner` makes one packed pass over the rows of a group, `sampling` turns logits into choices.
"""
