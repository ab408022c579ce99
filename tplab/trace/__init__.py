"""Chapter 11: traces of what a rank did and when, while computing and while communicating.

rank_trace   record a rank's timeline, and how much of its communication was hidden
chrome       export timelines for Perfetto and chrome://tracing
"""

from tplab.trace.chrome import save_chrome_trace
from tplab.trace.rank_trace import RankTrace, trace_rank

__all__ = [
    "RankTrace",
    "save_chrome_trace",
    "trace_rank",
]
