"""Run Flax's layer tests with the layers of jax_cudnn.flax in place of Flax's.

    python .ci/flax_tests.py [SDIST] [pytest arguments]

The tests come from the sdist of the installed version, which pip downloads by default."""

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import flax

FILES = ("linear", "conv", "normalization", "attention")
PLUGINS = Path(__file__).parent / "plugins"


def sdist(folder: Path) -> Path:
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:")
    subprocess.run([*pip, "--dest", str(folder), f"flax=={flax.__version__}"], check=True)
    (found,) = folder.glob("*.tar.gz")
    return found


def extract(archive: Path, folder: Path) -> list[str]:
    """Extracts the tests and returns their paths; raises KeyError if a file is missing."""
    root = f"flax-{flax.__version__}"
    paths = [f"{root}/tests/nnx/nn/{name}_test.py" for name in FILES]
    with tarfile.open(archive) as opened:
        opened.extractall(folder, [opened.getmember(path) for path in paths], filter="data")
    return [str(folder / path) for path in paths]


def main(arguments: list[str]) -> int:
    given = [a for a in arguments if a.endswith(".tar.gz")]
    options = [a for a in arguments if a not in given]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tests = extract(Path(given[0]) if given else sdist(folder), folder)
        (folder / "pytest.ini").write_text("[pytest]\n")  # not this project's settings
        plugins = ("-p", "flax_layers", "-p", "no:cacheprovider")
        settings = ("--rootdir", name, "-c", str(folder / "pytest.ini"))
        paths = [str(PLUGINS), *filter(None, [os.environ.get("PYTHONPATH")])]
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-q", *plugins, *settings, *options, *tests],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            check=False,
        ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
