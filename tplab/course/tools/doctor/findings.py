"""What an examination finds."""

from dataclasses import dataclass

GOOD, NOTE, BAD = "good", "note", "bad"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    state: "good"; "note", worth knowing, the course runs all the same; "bad", something will not work
    mend:  the command, or the sentence, that puts it right
    """

    what: str
    state: str
    text: str
    mend: str = ""
