"""Synthetic pairs: random weights of any shape whose drafts are accepted as often as asked for (`paceline synth-pair`).

`shapes` names the shapes, `successors` is what the pair agrees on, `weights` makes the tensors, `calibration` finds the
factor that gives an acceptance, `pair` writes it all. A synthetic pair is good for measuring speed alone.
"""
