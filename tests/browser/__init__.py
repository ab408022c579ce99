"""JupyterLab in a real browser: `lab` holds the pieces, `shoot` takes pictures, test_lab.py walks through a chapter."""
