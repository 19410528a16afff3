"""What our wheel must and must not contain: python check_wheel.py WHEEL"""

import sys
import zipfile
from pathlib import Path

wheel = sys.argv[1]
names = zipfile.ZipFile(wheel).namelist()
print(wheel, "with", len(names), "files")

assert "-py3-none-linux_" in wheel, "one wheel per platform serves every Python"
for name in ("libjax_cudnn.so", "libjax_cudnn_null_driver.so"):
    assert f"jax_cudnn/_lib/{name}" in names, name
profiles = [
    name for name in names if name.startswith("jax_cudnn/_core/planning/deviceless/profiles/")
]
assert any(name.endswith(".json") for name in profiles), "no profiles"
sources = [name for name in names if name.endswith((".c", ".cc", ".h", "CMakeLists.txt"))]
assert not sources, sources
strangers = [name for name in names if not name.startswith(("jax_cudnn/", "jax_cudnn-"))]
assert not strangers, strangers
size = Path(wheel).stat().st_size
assert size < 815_000, f"{size} bytes"
package = Path(__file__).parents[1] / "jax_cudnn"
written = [p for p in package.rglob("*") if p.suffix in (".py", ".cc", ".h", ".c")]
lines = sum(len(path.read_text().splitlines()) for path in written)
assert lines < 48_350, f"{lines} lines of Python and C++"
tests = sum(len(p.read_text().splitlines()) for p in package.with_name("tests").rglob("*.py"))
assert tests < 32_100, f"{tests} lines of tests"
print(f"{size} bytes; {lines} lines in the package")
