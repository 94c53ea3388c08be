"""Traces: the record of a sampler's cache decisions for each sequence, and how traces are checked, batched and stored.

record.py     EvictionTrace, which holds evict_at and further sections; functions that batch, pack and store traces
sections.py   the kinds of section, each declared once: in this package, or by the cache method that records it
checks.py     checks that reject values that no sampler can have recorded
files.py      the format of trace files;  sealed.py  files with a hash of their whole content
"""

from sparse_rl.trace.checks import NEVER, policy_part
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
    "policy_part",
    "read_fingerprint",
    "save_traces",
]
