"""The tests of tplab and of the course."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # the folder that holds chapters/, tplab/ and tests/
