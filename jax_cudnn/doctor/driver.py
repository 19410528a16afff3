"""Queries the CUDA driver: ``python driver.py`` prints one report for ``process.run``.

This script uses the standard library alone, so that it starts quickly and nothing else can break
it. It creates no CUDA context, and so uses no GPU memory.
"""

import ctypes
import json
import sys

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR


def ask() -> dict:
    """``missing`` (why there is no driver), or ``version``, ``status``, ``text`` and ``gpus``."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return {"missing": str(error)}
    number = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(number))
    told = {"path": _path(), "version": number.value, "text": "", "gpus": []}
    told["status"] = driver.cuInit(0)
    if told["status"] == 0:
        told["status"] = driver.cuDeviceGetCount(ctypes.byref(number))
    if told["status"] != 0:
        told["text"] = _text(driver, told["status"])
        return told
    told["gpus"] = [_gpu(driver, ordinal) for ordinal in range(number.value)]
    return told


def _gpu(driver: ctypes.CDLL, ordinal: int) -> dict:
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    size, name = ctypes.c_size_t(), ctypes.create_string_buffer(256)
    _check(driver, driver.cuDeviceGet(ctypes.byref(device), ordinal))
    _check(driver, driver.cuDeviceGetName(name, len(name), device))
    _check(driver, driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device))
    _check(driver, driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device))
    _check(driver, driver.cuDeviceTotalMem_v2(ctypes.byref(size), device))
    return {
        "name": name.value.decode(errors="replace"),
        "capability": f"{major.value}.{minor.value}",
        "gib": round(size.value / 2**30, 1),
    }


def _check(driver: ctypes.CDLL, status: int) -> None:
    if status != 0:
        sys.exit(f"the CUDA driver returned {status}: {_text(driver, status)}")


def _text(driver: ctypes.CDLL, status: int) -> str:
    text = ctypes.c_char_p()
    driver.cuGetErrorString(status, ctypes.byref(text))
    return (text.value or b"an error without a text").decode(errors="replace")


def _path() -> str:
    try:
        with open("/proc/self/maps") as maps:
            return next(line.split(maxsplit=5)[5].strip() for line in maps if "libcuda.so" in line)
    except (OSError, StopIteration, IndexError):
        return "libcuda.so.1"


if __name__ == "__main__":
    print(json.dumps({"stage": "driver"}), flush=True)
    print(json.dumps({"stage": "driver", **ask()}), flush=True)
