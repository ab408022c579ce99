"""Findings of `tplab doctor`."""

from dataclasses import dataclass

GOOD, NOTE, BAD = "good", "note", "bad"


@dataclass(frozen=True)
class Finding:
    """One thing that was examined.

    state: "good"; "note", worth knowing, but the course still runs; "bad", something won't work
    mend:  the command or the sentence that fixes it
    """

    what: str
    state: str
    text: str
    mend: str = ""
