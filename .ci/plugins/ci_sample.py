"""A pytest plugin: of each test's cases no more than CI_CASES, others for each commit."""

import os
from zlib import crc32


def pytest_collection_modifyitems(config, items):
    most, cases = int(os.environ["CI_CASES"]), {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)

    def drawn(item):
        return crc32(f"{os.environ['CI_COMMIT']} {item.nodeid}".encode())

    kept = set()
    for found in cases.values():
        kept.update(sorted(found, key=drawn)[:most])
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]
