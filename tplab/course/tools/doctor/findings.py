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


def count(number: int, thing: str) -> str:
    """ "1 GPU", "2 GPUs"."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def size(octets: float) -> str:
    """ "64 MiB", "1.5 GiB"."""
    return f"{octets / 2**30:.1f} GiB" if octets >= 2**30 else f"{octets / 2**20:.0f} MiB"
