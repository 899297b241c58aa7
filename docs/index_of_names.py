"""Write src/coterie/index.json and the methods of src/coterie/__init__.pyi from the decorators.

    .venv/bin/python docs/index_of_names.py           # write what is out of date
    .venv/bin/python docs/index_of_names.py --check   # only name it; exit code 1 if there is any

Every module of the package is imported, so that all that is registered is known. What is new comes
after what the index had before: the order of lists, and of ``compare --methods all``, is the
index's.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from pathlib import Path
from typing import Any

from methods_pages import write_or_check

import coterie
from coterie.registry import INDEX, METHODS, REGISTRIES, Registry

STUB = INDEX.with_name("__init__.pyi")
MARK = "# The methods: made by docs/index_of_names.py."
OPTIONAL = (
    "coterie.engines.flower",
    "coterie.engines.ray",
    "coterie.report.live",
    "coterie.tracking.",
)
WITH_PARAMETERS = ("models", "sets", "partitions", "shifts")


def wanted() -> dict[Path, str]:
    """The text that both files should have."""
    for found in pkgutil.walk_packages(coterie.__path__, "coterie."):
        if not (found.name.startswith(OPTIONAL) or found.name.endswith("__main__")):
            importlib.import_module(found.name)
    tree: dict[str, Any] = {each.group: rows(each) for each in REGISTRIES}
    tree["commands"] = commands()
    text = json.dumps(tree, indent=1, ensure_ascii=False) + "\n"
    return {INDEX: text, STUB: stub(tree["methods"])}


def rows(registry: Registry[Any]) -> dict[str, dict[str, str]]:
    """What is registered by modules of Coterie, by name."""
    from coterie.report.listings import parameters_of
    from coterie.report.method_help import explain

    ours = {n: at for n, at in registry.registered.items() if at[0].startswith("coterie.")}
    found = {}
    for name in [
        *(n for n in registry.index if n in ours),
        *(n for n in ours if n not in registry.index),
    ]:
        module, about = ours[name]
        row = {"module": module, "about": about}
        if registry is METHODS:
            row |= explain(name, registry[name]).row
        elif registry.group in WITH_PARAMETERS:
            row["parameters"] = parameters_of(registry[name], registry.given)
        found[name] = row
    return found


def commands() -> dict[str, dict[str, str]]:
    """What the commands that are imported late do, in their own words."""
    from coterie.cli.app import LATER, load

    return {name: {"about": (load(name).help or "").split("\n\n")[0]} for name in LATER}


def stub(methods: dict[str, dict[str, str]]) -> str:
    """The stub with the methods after its mark."""
    head = STUB.read_text().partition(MARK)[0].rstrip()
    names = sorted((row["module"], name.replace("-", "_")) for name, row in methods.items())
    lines = [f"from {module} import {name} as {name}" for module, name in names]
    return "\n".join([head, "", MARK, *lines]) + "\n"


if __name__ == "__main__":
    write_or_check(__doc__, wanted())
