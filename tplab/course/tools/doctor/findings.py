"""The findings of `tplab doctor`, each of which is about one thing, such as the memory or a chapter."""

from dataclasses import dataclass

GOOD, NOTE, BAD = "good", "note", "bad"


@dataclass(frozen=True)
class Finding:
    """The result of examining one thing.

    what:  the name of the thing
    state: "good"; "note" if it's worth knowing, but the course still runs; "bad" if something won't work
    mend:  the command that fixes it, or a sentence that says how to
    """

    what: str
    state: str
    text: str
    mend: str = ""
