"""The notes that pictures of single methods need."""

from __future__ import annotations

from coterie.errors import ConfigError
from coterie.report.reading import Reading

# By picture: the notes of which a run must have one, and the methods that write them.
NEEDS: dict[str, tuple[tuple[str, ...], str]] = {
    "mixing": (("mixing", "weights"), "user-centric with up to 200 clients, or of fedfomo"),
    "trials": (("phase",), "dc-pfl"),
    "hopkins": (("hopkins",), "fedtsdp"),
    "divergence": (
        ("distances", "divergence", "unscaled_distances"),
        "a method that notes distances of clients, such as dc-pfl, fedclust, fl-hc, pacfl or "
        "fedtsdp",
    ),
    "distances-by-layer": (
        ("layer_distances",),
        "a method whose clients sent whole models to compare, up to 100 clients: fl-hc, dc-pfl, "
        'user-centric with streams="auto", fedclust where the final layer was no help, or '
        "coterie groups --by model",
    ),
}


def check_needs(name: str, reading: Reading) -> None:
    """Raise a ``ConfigError`` if a run has none of the notes that this picture needs."""
    keys, methods = NEEDS.get(name, ((), ""))
    notes = [event.get("notes") or {} for event in reading.events]
    if keys and not any(noted.get(key) is not None for noted in notes for key in keys):
        raise ConfigError(
            f"{reading.name}: picture '{name}' needs a run of {methods}; this one, of "
            f"{reading.method}, recorded nothing for it"
        )
