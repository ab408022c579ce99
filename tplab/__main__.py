"""`python -m tplab` is the command `tplab`."""

import sys

from tplab.course.tools.cli import main

sys.exit(main())
