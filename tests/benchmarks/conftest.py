"""Makes the clone's ``benchmarks`` importable, behind all that is installed."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))
