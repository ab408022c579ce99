"""Run the `tplab` command with `python -m tplab`."""

import sys

from tplab.course.tools.cli import main

sys.exit(main())
