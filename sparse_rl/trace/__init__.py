"""Traces: the record of a sampler's cache decisions for each sequence; how they are checked, batched and stored."""

from sparse_rl.trace.files import FORMAT_VERSION, read_fingerprint
from sparse_rl.trace.record import EvictionTrace, batch_traces, load_traces, pack_traces, pinned, save_traces
from sparse_rl.trace.sections import NEVER, SECTIONS, Section, TraceError, declared, policy_part
from sparse_rl.trace.support import Supports

__all__ = [
    "FORMAT_VERSION",
    "NEVER",
    "SECTIONS",
    "EvictionTrace",
    "Section",
    "Supports",
    "TraceError",
    "batch_traces",
    "declared",
    "load_traces",
    "pack_traces",
    "pinned",
    "policy_part",
    "read_fingerprint",
    "save_traces",
]
