"""Findings of `tplab doctor`."""

from dataclasses import dataclass

GOOD, NOTE, BAD = "good", "note", "bad"


@dataclass(frozen=True)
class Finding:
    """The result of examining one thing.

    state: "good"; "note" if it's worth knowing, but the course still runs; "bad" if something won't work
    mend:  the command or the sentence that fixes it
    """

    what: str
    state: str
    text: str
    mend: str = ""
