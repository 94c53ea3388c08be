"""The record of what a sampler did to the cache of each sequence, and all that happens to it on the way to a forward.

record.py     EvictionTrace: evict_at and further sections; several traces as one batch, one packed sequence, one file
sections.py   the kinds of section, each declared once, by the method that records it or here
checks.py     the values that no sampler can have recorded
files.py      the format of their files;  sealed.py  files of tensors and texts with a hash of all of it

It knows tensors and files; it knows neither policies nor engines nor attention.
"""

from sparse_rl.trace.checks import NEVER
from sparse_rl.trace.files import FORMAT_VERSION, read_fingerprint
from sparse_rl.trace.record import EvictionTrace, batch_traces, load_traces, pack_traces, save_traces
from sparse_rl.trace.sections import SECTIONS, Section, TraceError, declared

__all__ = [
    "FORMAT_VERSION",
    "NEVER",
    "SECTIONS",
    "EvictionTrace",
    "Section",
    "TraceError",
    "batch_traces",
    "declared",
    "load_traces",
    "pack_traces",
    "read_fingerprint",
    "save_traces",
]
