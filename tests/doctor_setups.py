"""Set-ups for test_doctor.py: environments without some packages, libraries compiled here."""

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import jax

import jax_cudnn as jc

COMPILER = shutil.which("cc")
PLUGIN = ("jax_plugins", "jax_cuda", "jax-cuda")
CUDNN = ("cudnn", "nvidia")

DRIVER = """
#include <stdlib.h>
#include <string.h>
static int hidden() { return getenv("CUDA_VISIBLE_DEVICES") != 0; }
int cuDriverGetVersion(int* version) { *version = 13000; return 0; }
int cuInit(unsigned flags) { if (INIT < 0) abort(); return hidden() ? 100 : INIT; }
int cuGetErrorString(int error, const char** text) { *text = "no CUDA-capable device"; return 0; }
int cuGetErrorName(int error, const char** text) { *text = "CUDA_ERROR_NO_DEVICE"; return 0; }
int cuDeviceGetCount(int* count) { *count = 1; return 0; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char* name, int size, int device) { strcpy(name, "Fake GPU"); return 0; }
int cuDeviceGetAttribute(int* value, int what, int device) { *value = what - 66; return 0; }
int cuDeviceTotalMem_v2(size_t* bytes, int device) { *bytes = 3ul << 30; return 0; }
"""
LIBRARY = """
#include <stdlib.h>
size_t cudnnGetVersion() { if (VERSION < 0) abort(); return VERSION; }
"""


EXECUTOR = """
#include "xla/ffi/api/c_api.h"
XLA_FFI_Error* JaxCudnnInstantiate(XLA_FFI_CallFrame* frame) {
  XLA_FFI_Metadata_Extension* asked = (XLA_FFI_Metadata_Extension*)frame->extension_start;
  asked->metadata->api_version.major_version = XLA_FFI_API_MAJOR;
  asked->metadata->api_version.minor_version = XLA_FFI_API_MINOR + NEWER;
  return 0;
}
XLA_FFI_Error* JaxCudnnInitialize(XLA_FFI_CallFrame* f) { return JaxCudnnInstantiate(f); }
XLA_FFI_Error* JaxCudnnExecute(XLA_FFI_CallFrame* f) { return JaxCudnnInstantiate(f); }
void JaxCudnnSetFallbackPath(const char* path) {}
void JaxCudnnBeginExit() {}
int64_t JaxCudnnLoadedVersion() { return 0; }
const char* JaxCudnnLoadedPath() { return ""; }
"""


def compiled(folder, source, soname, define):
    """A folder for LD_LIBRARY_PATH with a library of that name."""
    (folder / "source.c").write_text(source)
    options = ["-shared", "-fPIC", f"-D{define}", f"-I{jax.ffi.include_dir()}", "-o", soname]
    subprocess.run(
        [COMPILER, *options, f"-Wl,-soname,{soname}", "source.c"], cwd=folder, check=True
    )
    return {"LD_LIBRARY_PATH": str(folder)}


def driver(folder, init):
    return compiled(folder, DRIVER, "libcuda.so.1", f"INIT=({init})")


def cudnn(folder, version):
    return compiled(folder, LIBRARY, "libcudnn.so.9", f"VERSION=({version})")


def environment(folder, *without):
    """An interpreter that has this one's packages, but those whose names begin so."""
    venv.create(folder, symlinks=True, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    for entry in (Path(entry) for path in sys.path for entry in sorted(Path(path).glob("*"))):
        if entry.parent.name not in ("site-packages", "dist-packages", "site"):
            continue
        if entry.name.startswith(without) or entry.suffix == ".pth" or entry.name == "jax_cudnn":
            continue
        if not (site / entry.name).exists():
            (site / entry.name).symlink_to(entry)
    (site / "jax_cudnn").symlink_to(Path(jc.__file__).parent)
    return folder / "bin" / "python"


class Answer:
    """What the doctor says in an environment, and its exit code."""

    def __init__(self, interpreter, variables, folder):
        hidden = ("JAX_", "XLA_", "CUDA_", "PYTHON", "LD_", "VIRTUAL_ENV")
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
        done = subprocess.run(
            [str(interpreter), "-m", "jax_cudnn", "doctor", "--json"],
            env={**inherited, **variables},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert "Traceback" not in done.stderr, done.stderr
        self.code, self.json = done.returncode, json.loads(done.stdout)
        self.findings = {finding["name"]: finding for finding in self.json["findings"]}
        print(json.dumps(self.json["findings"], indent=1))

    def __getitem__(self, name):
        return self.findings[name]

    def problems(self):
        return [name for name, finding in self.findings.items() if finding["status"] == "problem"]
