"""GPUs to plan for: what cuDNN knows about a device, as JSON, one file a card in ``profiles/``."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

from ...errors import TargetError

_FOLDER = Path(__file__).parent / "profiles"

# Newer than cuDNN 9.19, which neither writes nor minds them; cuDNN 9.28 refuses properties without
# memoryBusWidth. So they are always given: with 0, 1000 and 6144 bits all plans compared (conv,
# matmul, attention, norms, reduction) were the same.
_DEFAULTS = {"smCountOrigin": 0, "oversizedSharedMemoryPerBlock": 0, "memoryBusWidth": 0}

HOW_TO_READ = (
    "on a machine with the GPU, save cudnn.create_device_properties(0).serialize() to a file and "
    "pass it to jax_cudnn.Profile.from_json"
)


@dataclasses.dataclass(frozen=True)
class Profile:
    """A description of one GPU model, which planning without a GPU needs. Hashable.

    Attributes:
        name: the name that users write (``"H200"``).
        sm_version: the compute capability times ten (90).
        device_name: the driver's name (``"NVIDIA H200"``).
        properties_json: the text for ``cudnn.create_device_properties``.
        measured: True if the properties were read on a device; False if they come from public
            specifications, which ``source`` in a file of ``profiles/`` names. Clocks, cache, bus
            and memory are then rounded: with each of them 5 to 25 % lower, cuDNN 9.28 chose the
            same engines and workspace on an A100 for all of 45 graphs (convolutions, matmuls,
            pointwise). Only the number of SMs mattered: it is exact.
    """

    name: str
    sm_version: int
    device_name: str
    properties_json: str
    measured: bool = True

    def __post_init__(self) -> None:
        try:
            memory = json.loads(self.properties_json).get("totalGlobalMem", 0)
            fits = isinstance(self.sm_version, int) and isinstance(memory, int) and memory >= 0
        except (AttributeError, TypeError, ValueError):
            fits, memory = False, None
        if not fits:
            raise TargetError(
                "a profile does not describe a GPU",
                expected="sm_version and totalGlobalMem as whole numbers, properties_json as JSON",
                got=f"{self.sm_version!r}, {memory!r}, {_shorten(self.properties_json)}",
                fix=HOW_TO_READ,
            )

    @classmethod
    def from_json(cls, source: str | Path, name: str | None = None) -> Profile:
        """A profile from a file or from JSON text.

        Args:
            source: the path or the text of cuDNN's device properties
                (``cudnn.create_device_properties(0).serialize()``), or of a file like those in
                ``profiles/``.
            name: by default the name in the file, else that of the device.

        Raises:
            TargetError: the file cannot be read, or does not describe a GPU.
        """
        content = _parse(source)
        properties = content.get("properties", content)
        try:
            device_name = str(properties["deviceName"])
            sm_version = int(properties["deviceVer"]) // 10
        except (KeyError, TypeError, ValueError) as error:
            raise TargetError(
                "this JSON does not describe a GPU",
                expected="cuDNN's device properties, with at least deviceName and deviceVer",
                got=_shorten(source),
                why=f"{type(error).__name__}: {error}",
                fix=HOW_TO_READ,
            ) from error
        text = json.dumps({**_DEFAULTS, **properties}, sort_keys=True, separators=(",", ":"))
        name = name or str(content.get("name", device_name))
        return cls(name, sm_version, device_name, text, bool(content.get("measured", True)))


def names() -> tuple[str, ...]:
    """The names of the profiles that come with this package, sorted."""
    return tuple(sorted(profile.name for profile in _shipped().values()))


def get(name: str) -> Profile:
    """The profile with this name or device name, ignoring case.

    ``"H100"``, ``"NVIDIA H100"`` and the driver's ``"NVIDIA H100 80GB HBM3"`` are the same.

    Raises:
        TargetError: there is no such profile; the message lists all.
    """
    try:
        own = {p.device_name.lower().removeprefix("nvidia "): p for p in _shipped().values()}
        return {**own, **_shipped()}[name.strip().lower().removeprefix("nvidia ")]
    except (KeyError, AttributeError):
        # A name that is written in another way; other numbers are other GPUs.
        letters = "".join(filter(str.isalnum, str(name))).lower().removeprefix("nvidia")
        meant = (f"did you mean {known!r}?" for known in names() if known.lower() == letters)
        raise TargetError(
            "unknown GPU",
            expected=f"one of {', '.join(names())}",
            got=repr(name),
            why="planning without a GPU needs a profile of it, and none is shipped for this one",
            fix=" Else, ".join([*meant, HOW_TO_READ]),
        ) from None


def shipped() -> tuple[Profile, ...]:
    """The profiles that come with this package, the oldest architecture first."""
    return tuple(sorted(_shipped().values(), key=lambda p: (p.sm_version, p.name)))


@functools.cache
def _shipped() -> dict[str, Profile]:
    profiles = (Profile.from_json(path) for path in sorted(_FOLDER.glob("*.json")))
    return {profile.name.lower(): profile for profile in profiles}


def _parse(source: str | Path) -> dict[str, Any]:
    try:
        if isinstance(source, str) and source.lstrip().startswith("{"):
            content = json.loads(source)
        else:
            content = json.loads(Path(source).read_text(encoding="utf-8"))
        if not isinstance(content, dict) or not isinstance(content.get("properties", {}), dict):
            raise ValueError("not a JSON object")
        return content
    except (OSError, TypeError, ValueError) as error:
        raise TargetError(
            "cannot read this GPU profile",
            expected="the path of a JSON file, or JSON text that starts with {",
            got=_shorten(source),
            why=f"{type(error).__name__}: {error}",
            fix=HOW_TO_READ,
        ) from error


def _shorten(source: object) -> str:
    text = repr(source)
    return text if len(text) <= 200 else text[:200] + "..."
