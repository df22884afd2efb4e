"""Segments: a tensor that is stepped at once, its state, and the places of its elements in the model."""

from everybit_torch.segments.contiguous import Memory, Run, neighbours
from everybit_torch.segments.host_state import (
    HostState, Offload, empty_on_host, require_offload, require_streams, staging_bytes,
)  # fmt: skip
from everybit_torch.segments.segment import PIECE, HostMemory, Segment, Watched, WatchedDType, piece_size, write
from everybit_torch.segments.short import Bucket, indices, is_short, most_short, upper_words
from everybit_torch.segments.single import Places, Single
from everybit_torch.segments.sources import Sources
from everybit_torch.segments.steps import Compile, Steps, require_compile
from everybit_torch.segments.totals import Partial, Work, find_totals

__all__ = [
    "PIECE", "Bucket", "Compile", "HostMemory", "HostState", "Memory", "Offload", "Partial", "Places", "Run", "Segment",
    "Single", "Sources", "Steps", "Watched", "WatchedDType", "Work", "empty_on_host", "find_totals", "indices",
    "is_short", "most_short", "neighbours", "piece_size", "require_compile", "require_offload", "require_streams",
    "staging_bytes", "upper_words", "write",
]  # fmt: skip
