"""Runs notebooks, two at a time, after checking each against its .py.

run_notebooks.py IPYNB...                 fails where a cell fails, or differs from the .py
run_notebooks.py --write FOLDER IPYNB...  also writes the executed notebooks into FOLDER
"""

import argparse
import asyncio
import copy
import os
import sys
import time
from pathlib import Path

import jupytext
import nbclient
import nbformat


def cells(notebook):
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def without_logs(notebook):
    """The notebook without what libraries log: it names paths and times of one machine."""
    notebook = copy.deepcopy(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
    return notebook


async def run(path, folder, at_once):
    """None, or what failed."""
    notebook, script = jupytext.read(path), jupytext.read(path.with_suffix(".py"))
    if cells(notebook) != cells(script):
        return f"{path} differs from its .py; run: jupytext --sync {path}"
    async with at_once:
        began = time.time()
        client = nbclient.NotebookClient(
            notebook,
            timeout=600,
            kernel_name="python3",
            record_timing=False,
            coalesce_streams=True,  # one output for what a cell prints
            extra_arguments=["--log-level=ERROR"],  # of the kernel: it warns of its connection
        )
        try:
            await client.async_execute(cwd=str(path.parent))
        except nbclient.exceptions.CellExecutionError as error:
            return f"{path}: {error}"
        print(f"{path}: executed in {time.time() - began:.0f} s", flush=True)
    if folder is not None:
        nbformat.write(without_logs(notebook), folder / path.name)
    return None


async def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", type=Path, metavar="FOLDER")
    parser.add_argument("notebooks", type=Path, nargs="+")
    given = parser.parse_args()
    if given.write is not None:
        given.write.mkdir(parents=True, exist_ok=True)
    at_once = asyncio.Semaphore(2)
    failures = await asyncio.gather(*(run(path, given.write, at_once) for path in given.notebooks))
    return "\n".join(filter(None, failures)) or None


os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # two kernels share a GPU
sys.exit(asyncio.run(main()))
