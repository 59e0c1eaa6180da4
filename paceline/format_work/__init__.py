"""How much work a response format gives the library that compiles it, counted before it does.

The library limits its work by steps, but one step takes as long as the regexes that meet in it are long, all
multiplied. What it writes out of a schema is limited only once it stands in memory. Everything here is counted from the
text alone: every service refuses the same formats, however fast it is. Knows what the library does with a format, and
never calls it.
"""
