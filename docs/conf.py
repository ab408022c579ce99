"""The course as a web site, for reading: `make book` writes it to build/book.

The chapters are the executed solutions, with every answer folded away below the learner's blank cell (see pages.py).
The reference comes from docstrings (see api.py).
"""

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from api import write_reference  # noqa: E402  (these two modules are in this folder)
from pages import draw_landing, write_pages  # noqa: E402

# Drawing what the controls show takes some minutes. BOOK_STATES may name the chapters for which it's done
CHOSEN = os.environ.get("BOOK_STATES")
write_pages(HERE.parent, HERE / "_pages", HERE / "_extra", None if CHOSEN is None else CHOSEN.split())
draw_landing(HERE / "_extra" / "landing")
write_reference(HERE / "_pages")

project = "tplab"
DESCRIPTION = "A hands-on course: write Megatron-style tensor parallelism in notebooks, checked on real processes."
author = "the authors of tplab"
html_title = "tplab: tensor parallelism, built by hand"
copyright = f"{author}; Apache-2.0"
extensions = ["myst_nb"]
html_favicon = "_static/favicon.svg"
html_baseurl = os.environ.get("BOOK_URL", "")  # where the book is published
myst_html_meta = {"description": DESCRIPTION, "property=og:title": html_title, "property=og:description": DESCRIPTION}
if html_baseurl:  # a preview has to have a full address
    myst_html_meta["property=og:image"] = f"{html_baseurl.rstrip('/')}/landing/tensor.png"
html_theme = "sphinx_book_theme"
html_theme_options = {"show_toc_level": 2, "use_fullscreen_button": False, "navbar_persistent": []}
html_static_path = ["_static"]
html_extra_path = ["_extra"]
html_css_files = ["book.css"]
html_js_files = ["replay.js", "states.js"]
html_search_scorer = str(HERE / "search_scorer.js")
mathjax_path = "mathjax/tex-chtml.js"  # in _static, so that the book needs no network
mathjax3_config = {"options": {"enableMenu": False}}  # the menu would fetch parts that aren't in _static

nb_execution_mode = "off"  # the notebooks were executed by `make notebooks`
nb_merge_streams = True
myst_enable_extensions = ["colon_fence", "dollarmath", "amsmath"]
myst_heading_anchors = 3
suppress_warnings = ["mystnb.unknown_mime_type"]  # a control's live view; its picture stands beside it
nitpicky = True
linkcheck_timeout = 20
