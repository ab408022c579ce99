"""The tests of tplab and of the course."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # the folder that holds chapters/, tplab/ and tests/


def saying(*parts: str) -> str:
    """A pattern for messages that contain these parts in this order. The words between them may change."""
    return "(?s)" + ".*".join(map(re.escape, parts))
