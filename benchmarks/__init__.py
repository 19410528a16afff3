"""The project's own measurements: ``python -m benchmarks`` in the root of a clone.

What is measured is the installed ``jax_cudnn``: the clone is the last place to look for it.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [
    *(path for path in sys.path if Path(path or ".").resolve() != ROOT),
    str(ROOT),
    str(ROOT / "tests"),  # its cases are measured, too
]
