"""Looking up what followed the same tokens earlier, compiled.

`hatch_build.py` builds `suffixes.cpp` when the package is installed, if there is a compiler; `library.py` opens it, and
`indexed_text.py` and `suffix_index.py` call it. Without it no drafts are looked up.
"""

from coordinator.drafting.native.library import GuessRoom, Library, find_library

__all__ = ["GuessRoom", "Library", "find_library"]
