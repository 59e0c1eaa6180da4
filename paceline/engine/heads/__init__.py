"""The target's own heads: they draft from what its passes compute anyway, inside the target service.

`interface` says what a kind of heads is; each kind has a file; `drafting` keeps what they know of each sequence and
drafts. A lost state costs drafts and never output: the target verifies them as it does all others.
"""
