"""What tuning costs, with the processes in this one."""

import json

from benchmarks import documents, tuning

LOWERING = {"seconds": 16.5, "again": 0.4, "gpu": "H200", "cpus": 2}
START = {"lower_s": 1.0, "compile_s": 2.0, "step_s": 0.5}


def test_each_process_has_its_figures(tmp_path, monkeypatch):
    asked = []

    def process(arguments, variables):
        what, *rest = arguments
        asked.append((what, *rest[1:3], variables.get("JAX_CUDNN_TUNING")))
        if what == "model":
            return {"reason": "no memory"} if asked[-1][1] == "off" else START
        return LOWERING if what == "lowering" else tuning._call(arguments)

    monkeypatch.setattr(tuning, "_process", process)
    path = tmp_path / "tuning.json"
    tuning.run(path, "*t*/tiny", tiny=True)
    tuning.run(path, "sum-of-squares", tiny=True)
    models = [each for each in asked if each[0] == "model"]
    assert models == [
        ("model", way, name, way)
        for name in ("resnet/tiny", "gpt2/tiny")
        for way in ("fast", "fast", "off", "off")
    ]
    found = json.loads(path.read_text())
    assert found["environment"]
    assert len(found["graphs"]) == 2
    for graph in found["graphs"].values():
        starts = ["first", "second"]
        assert {way: [*of] for way, of in graph.items()} == {"fast": starts, "off": starts}
        assert all(seconds > 0 for of in graph.values() for seconds in of.values())
    found["starts"] = {"m": {"fast": {"first": START, "second": {"reason": "no memory"}}}}
    path.write_text(json.dumps(found))
    shown = documents.printed(path)
    assert "| m, tuning fast, first start | 1.0 | 2.0 | 0.5 | 3.5 |" in shown
    assert "| m, tuning fast, second start | no memory |" in shown
    assert "2 graphs, tuning off, second process" in shown
    assert "16.5 s with an empty plan cache" in shown
