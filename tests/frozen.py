"""Imported last by servers that fork: what they hold is never garbage, so their children need not look through it.

A collection in a child would write to every object of torch and Megatron, half a second and a copy of their memory.
"""

import gc

gc.collect()
gc.freeze()
