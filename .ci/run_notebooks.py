"""Runs notebooks as they are, after checking each against its .py: run_notebooks.py IPYNB..."""

import sys
import time

import jupytext
import nbclient


def cells(notebook):
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


for name in sys.argv[1:]:
    began = time.time()
    notebook, script = jupytext.read(name), jupytext.read(name.removesuffix("ipynb") + "py")
    assert cells(notebook) == cells(script), f"differs from its .py; run: jupytext --sync {name}"
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    print(f"{name}: executed in {time.time() - began:.0f} s")
