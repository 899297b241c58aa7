"""Coterie: federated learning among clients whose data differ.

>>> import coterie
>>> sorted(coterie.METHODS)[:2]
['adaptive', 'adaptive-tau']
"""

import ast as _ast
from pathlib import Path as _Path

from coterie.lazy import attach as _attach

__version__ = "0.1.0"


def _public_names() -> dict[str, str]:
    """The module of each public name, read from the stub file that editors use as well."""
    stub = _Path(__file__).with_suffix(".pyi").read_text()
    return {
        alias.name: node.module
        for node in _ast.parse(stub).body
        if isinstance(node, _ast.ImportFrom) and node.module not in (None, __name__)
        for alias in node.names
    }


__all__ = sorted(_public_names())
_attach(__name__, _public_names())
