"""Entry point of `python -m tplab.capstone`, which is implemented in `tplab.capstone.command`."""

import sys

from tplab.capstone.command import main

if __name__ == "__main__":
    sys.exit(main())
