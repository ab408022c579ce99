"""Run `python -m tplab.capstone`, see `tplab.capstone.command`."""

import sys

from tplab.capstone.command import main

if __name__ == "__main__":
    sys.exit(main())
