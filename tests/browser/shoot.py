"""Pictures of notebooks as JupyterLab shows them, from top to bottom.

python -m tests.browser.shoot solutions/04_*.ipynb --out shots          as saved, with the saved outputs
python -m tests.browser.shoot chapters/04_*.ipynb --out shots --run     run all cells first (a copy: the file stays)
"""

import argparse
import shutil
import tempfile
from pathlib import Path

from tests.browser.lab import Lab, browser, lab_server


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("shots"), help="folder for the pictures")
    parser.add_argument("--run", action="store_true", help="run all cells first")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=1600, help="pixels of one picture")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="shoot-") as folder:
        stems = {notebook: f"{notebook.resolve().parent.name}-{notebook.stem}" for notebook in options.notebooks}
        for notebook, stem in stems.items():
            shutil.copy(notebook, Path(folder, f"{stem}.ipynb"))
        with lab_server(Path(folder)) as server, browser() as chromium:
            lab = Lab(chromium, server)
            for stem in stems.values():
                with lab.notebook(f"{stem}.ipynb", width=options.width) as page:
                    if options.run:
                        page.run_all()
                    for picture in page.screenshots(options.out, stem, options.height):
                        print(picture)


if __name__ == "__main__":
    main()
