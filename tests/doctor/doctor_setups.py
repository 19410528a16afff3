"""Set-ups for test_doctor.py: environments without some packages, libraries compiled here."""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import jax_cudnn as jc

DRIVER = """
#include <stdlib.h>
#include <string.h>
static int hidden() { return getenv("CUDA_VISIBLE_DEVICES") != 0; }
int cuDriverGetVersion(int* version) { *version = 13000; return 0; }
int cuInit(unsigned flags) { if (VALUE < 0) abort(); return hidden() ? 100 : VALUE; }
int cuGetErrorString(int error, const char** text) { *text = "no CUDA-capable device"; return 0; }
int cuGetErrorName(int error, const char** text) { *text = "CUDA_ERROR_NO_DEVICE"; return 0; }
int cuDeviceGetCount(int* count) { *count = 1; return 0; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char* name, int size, int device) { strcpy(name, "Fake GPU"); return 0; }
int cuDeviceGetAttribute(int* value, int what, int device) { *value = what - 66; return 0; }
int cuDeviceTotalMem_v2(size_t* bytes, int device) { *bytes = 3ul << 30; return 0; }
"""
CUDNN = """
#include <stdlib.h>
size_t cudnnGetVersion() { if (VALUE < 0) abort(); return VALUE; }
"""


def compiled(source, soname, value, **variables):
    """What makes a folder for LD_LIBRARY_PATH with a library of that name."""

    def make(folder):
        (folder / "source.c").write_text(source)
        options = ["-shared", "-fPIC", f"-DVALUE=({value})", f"-Wl,-soname,{soname}", "-o", soname]
        subprocess.run(["cc", *options, "source.c"], cwd=folder, check=True)
        return {"LD_LIBRARY_PATH": str(folder), **variables}

    return make


def environment(folder, *without):
    """An interpreter that has this one's packages, but those whose names begin so."""
    venv.create(folder, symlinks=True, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    for entry in (Path(entry) for path in sys.path for entry in sorted(Path(path).glob("*"))):
        if entry.parent.name not in ("site-packages", "dist-packages", "site"):
            continue
        if entry.name.startswith(without) or entry.suffix == ".pth":
            continue
        if entry.name != "jax_cudnn" and not (site / entry.name).exists():
            (site / entry.name).symlink_to(entry)
    (site / "jax_cudnn").symlink_to(Path(jc.__file__).parent)
    return folder / "bin" / "python"


class Answer:
    """What the doctor says in an environment, and its exit code."""

    def __init__(self, interpreter, variables, folder):
        hidden = ("JAX_", "XLA_", "CUDA_", "PYTHON", "LD_", "VIRTUAL_ENV")
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
        command = [str(interpreter), "-m", "jax_cudnn", "doctor", "--json"]
        environ = {**inherited, **variables}
        done = subprocess.run(
            command, env=environ, cwd=folder, capture_output=True, text=True, timeout=300
        )
        assert "Traceback" not in done.stderr, done.stderr
        self.code, self.json = done.returncode, json.loads(done.stdout)
        self.findings = {finding["name"]: finding for finding in self.json["findings"]}

    def text(self, name):
        """Value, reason and advice of a finding."""
        return "\n".join(self.findings[name][part] or "" for part in ("value", "why", "fix"))

    def problems(self):
        return [name for name, finding in self.findings.items() if finding["status"] == "problem"]
