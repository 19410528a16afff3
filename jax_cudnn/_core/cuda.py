"""The part of the CUDA driver that planning needs: a device's context around a cuDNN handle."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import LibraryError


def device_nodes() -> list[str]:
    """Device files of this machine's NVIDIA GPUs; empty without one."""
    return [path for path in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg") if os.path.exists(path)]


@functools.cache
def kernel_driver() -> str:
    """The version of NVIDIA's kernel driver; empty where the system does not say it."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    version = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return version[0] if version else text.strip()


@dataclass(frozen=True)
class CudaDevice:
    """A GPU of this process by its CUDA ordinal."""

    ordinal: int

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make the device's primary context current, as cuDNN expects."""
        driver = _driver()
        device, context, previous = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        _check(driver.cuDeviceGet(ctypes.byref(device), self.ordinal), "cuDeviceGet")
        retained = driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        _check(retained, "cuDevicePrimaryCtxRetain")
        _check(driver.cuCtxPushCurrent_v2(context), "cuCtxPushCurrent")
        try:
            yield
        finally:
            driver.cuCtxPopCurrent_v2(ctypes.byref(previous))
            driver.cuDevicePrimaryCtxRelease_v2(device)

    @contextlib.contextmanager
    def planning_handle(self, cudnn: Any) -> Iterator[Any]:
        """The device's cuDNN handle for planning, used by one thread at a time."""
        with _planning_lock(self), self.current():
            yield _planning_handle(self, cudnn)

    def properties(self, cudnn: Any) -> str:
        """The device's properties in cuDNN's format (JSON text)."""
        return _properties(self, cudnn)

    def memory_bus_width(self) -> int:
        """In bits, by the driver: cuDNN 9.19's properties lack it."""
        driver = _driver()
        device, bits = ctypes.c_int(), ctypes.c_int()
        _check(driver.cuDeviceGet(ctypes.byref(device), self.ordinal), "cuDeviceGet")
        status = driver.cuDeviceGetAttribute(ctypes.byref(bits), _MEMORY_BUS_WIDTH, device)
        _check(status, "cuDeviceGetAttribute")
        return bits.value

    def free_memory(self) -> int:
        """Bytes that no process uses, by the driver."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        with self.current():
            status = _driver().cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        _check(status, "cuMemGetInfo")
        return free.value

    def model(self, cudnn: Any) -> tuple[str, int]:
        """The device's name, and its compute capability times ten."""
        properties = json.loads(self.properties(cudnn))
        return properties["deviceName"], int(properties["deviceVer"]) // 10


_MEMORY_BUS_WIDTH = 37  # CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH of cuda.h


@functools.cache
def _planning_lock(device: CudaDevice) -> threading.RLock:
    return threading.RLock()


@functools.cache
def _planning_handle(device: CudaDevice, cudnn: Any) -> Any:
    # Never destroyed: cuDNN may be torn down before us when the process ends.
    return cudnn.create_handle()


@functools.cache
def _properties(device: CudaDevice, cudnn: Any) -> str:
    with _planning_lock(device), device.current():
        return cudnn.create_device_properties(device.ordinal).serialize()


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise LibraryError(
            "the CUDA driver cannot be loaded",
            got=str(error),
            fix="install the NVIDIA driver, or plan for another machine with jax_cudnn.target",
        ) from error


def _check(status: int, call: str) -> None:
    if status != 0:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise LibraryError(f"{call} failed", got=f"{status}: {(text.value or b'?').decode()}")
