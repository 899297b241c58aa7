"""Registries as they were, after a test that registers something."""

import sys
from contextlib import contextmanager

from coterie.registry import REGISTRIES


@contextmanager
def restored():
    """What is registered or loaded from a file in here is forgotten afterwards.

    What comes with Coterie stays, if its module was first imported in here.
    """
    before = [(r, set(r), dict(r.own), set(r.registered)) for r in REGISTRIES]
    path, modules = list(sys.path), set(sys.modules)
    try:
        yield
    finally:
        for registry, names, own, registered in before:
            for name in set(registry) - names:
                del registry[name]
            registry.own = own
            for name in set(registry.registered) - registered:
                if not registry.registered[name][0].startswith("coterie."):
                    del registry.registered[name]
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            if name.startswith("file:"):
                del sys.modules[name]
