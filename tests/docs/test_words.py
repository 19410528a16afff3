"""Words and phrases that must not come back into what people read."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "BUILD.md", "CHANGELOG.md")]
NAMES = {"apart", "asked", "attending", "distrusted", "heart", "hearts", "later", "leftover"}
NAMES |= {"settled", "surroundings", "told", "variety", "wire"}
"""Words that no name has."""
_RATHER = r"(?!longer|more|less|fewer|slower|faster|larger|smaller|better|worse|later|other)"
PHRASES = [
    r"beside",  # next to, compared with
    r"behind",  # after
    r"in front of",  # before
    r"of (its|their) own",  # own, separate
    r"(?<!there\s)(?<!which\s)(is|are) no " + _RATHER + r"[a-z]+",  # is not a
    r"there (is|are) no \w+ yet",
    r"(is|are|was|were|be|not) told( so)?",  # reports, passes
    r"(is|are|was|were|not) asked for",  # requested
    r"in words",
    r"(?<!dims\s)(is|are) (XLA|cuDNN)'s(?=[.,;:)]|\s+and)",  # runs in XLA, on cuDNN
    r"by (Flax|lax|JAX)'s (own )?way",  # falls back to
    r"one (after|behind|beside) (the other|another)",  # sequentially, packed along the token axis
    r"by itself",  # independently, alone
    r"(cuDNN|XLA|Flax|JAX) has (not|none)",
    r"mend(s|ed|ing)?",  # fixed
    r"for ever",
    r"wish(es|ed)?",
    r"and the like",
    r"looked into",
    r"doors?",
    r"(left|given) to (XLA|Flax|lax|cuDNN)|(is|are) left to it",
    r"(in|at) the place of",
    r"who(ever)? (drives|wants|knows|writes|asks)",
]
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_SHOWING = (
    r"Error$|Parser$|(^|\.)(print|warn(ing)?|info|debug|error|log|write|add_(argument|parser))$"
)
FOUND = re.compile(r"\b(" + "|".join(p.replace(" ", r"\s+") for p in PHRASES) + r")(?!\w)", re.I)


def texts():
    """What people read: the file, its first line there, and the text."""
    for path in (*PAGES, *sorted((ROOT / "docs").glob("*.md"))):
        yield path, 1, path.read_text()
    for path in sorted((ROOT / "jax_cudnn").rglob("*.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, _DOCUMENTED) and ast.get_docstring(node):
                yield path, node.body[0].lineno, node.body[0].value.value
        calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
        showing = (node for node in calls if re.search(_SHOWING, ast.unparse(node.func)))
        for shown_by in (*showing, *(n for n in ast.walk(tree) if isinstance(n, ast.Raise))):
            for node in ast.walk(shown_by):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield path, node.lineno, node.value
    for path in sorted((ROOT / "benchmarks").rglob("*.py")):
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        docstrings = [node.value for node in nodes if isinstance(node, ast.Expr)]
        for node in nodes:
            if isinstance(getattr(node, "value", None), str) and node not in docstrings:
                yield path, node.lineno, node.value
    for path in sorted((ROOT / "jax_cudnn" / "csrc").rglob("*.cc")):
        text = path.read_text()
        for literal in re.finditer(r'"([^"\\\n]|\\.)*"(\s*"([^"\\\n]|\\.)*")*', text):
            line = text.count("\n", 0, literal.start()) + 1
            yield path, line, re.sub(r'"\s*"', "", literal[0])


def test_no_phrase_comes_back():
    found = {
        f"{path.relative_to(ROOT)}:{first + text.count(chr(10), 0, hit.start())}: {hit[0]}"
        for path, first, text in texts()
        for hit in FOUND.finditer(text)
    }
    assert not found, "\n".join(sorted(found))


def test_no_name_has_such_a_word():
    found = set()
    for path in (ROOT / "jax_cudnn").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = (getattr(node, field, None) for field in ("id", "arg", "attr", "name"))
            for name in names:
                if isinstance(name, str) and {*name.lower().split("_")} & NAMES:
                    found.add(f"{path.relative_to(ROOT)}: {name}")
    assert not found
