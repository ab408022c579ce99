"""Run the `tplab` command with `python -m tplab`."""

import sys

from tplab.course.commands.cli import main

sys.exit(main())
