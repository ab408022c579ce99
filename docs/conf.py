"""The course as a web site, for reading: `make book` writes it to build/book.

The chapters are the executed solutions, with every answer folded away below the learner's blank cell (see pages.py).
The reference comes from docstrings (see api.py).
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from api import write_reference  # noqa: E402  (these two modules are in this folder)
from pages import write_pages  # noqa: E402

write_pages(HERE.parent, HERE / "_pages")
write_reference(HERE / "_pages")

project = "tplab"
author = "the authors of tplab"
html_title = "tplab: tensor parallelism, built by hand"
copyright = f"{author}; Apache-2.0"
extensions = ["myst_nb"]
html_theme = "sphinx_book_theme"
html_theme_options = {"show_toc_level": 2, "use_fullscreen_button": False, "navbar_persistent": []}
html_static_path = ["_static"]
html_css_files = ["book.css"]
html_js_files = ["replay.js"]
mathjax_path = "mathjax/tex-chtml.js"  # in _static, so that the book needs no network
mathjax3_config = {"options": {"enableMenu": False}}  # the menu would fetch parts that aren't in _static

nb_execution_mode = "off"  # the notebooks were executed by `make notebooks`
nb_merge_streams = True
myst_enable_extensions = ["colon_fence", "dollarmath", "amsmath"]
myst_heading_anchors = 3
suppress_warnings = ["mystnb.unknown_mime_type"]  # a control's live view; its picture stands beside it
nitpicky = True
linkcheck_timeout = 20
