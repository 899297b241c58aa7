"""A plan laid out for workers elsewhere, which may all see one copy of the data."""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from coterie.client.plan import Plan
from coterie.data.population import Population
from coterie.errors import EngineError

_NOBODY = Population((), "table", (), None, 0)


@dataclass(frozen=True)
class SharedPlan:
    """The plan without its data, the form of the data, and the data: an array for each storage.

    Clients' samples are views of a few storages. As plain arrays these can lie in memory that many
    processes share, and nobody needs a copy.
    """

    plan: bytes
    form: bytes
    arrays: list[Any]

    @property
    def size(self) -> int:
        """In bytes."""
        return len(self.plan) + len(self.form) + sum(int(a.nbytes) for a in self.arrays)


def laid_out(plan: Plan, dumps: Callable[[Any], bytes]) -> SharedPlan:
    """The goods of a plan whose method goes by name; ``dumps`` pickles a user's own objects."""
    arrays: list[Any] = []
    places: dict[int, int] = {}

    class Form(pickle.Pickler):
        def persistent_id(self, thing: Any) -> Any:
            if type(thing) is not Tensor:
                return None
            storage = thing.untyped_storage()
            place = places.setdefault(storage.data_ptr(), len(arrays))
            if place == len(arrays):
                arrays.append(torch.empty(0, dtype=torch.uint8).set_(storage).numpy())
            return place, thing.dtype, thing.storage_offset(), thing.shape, thing.stride()

    form = io.BytesIO()
    Form(form).dump(plan.population)
    try:
        rest = dumps(replace(plan, population=_NOBODY))
    except Exception as error:  # pickling runs whatever a user's objects do
        raise EngineError(
            f"the model, loss or metrics cannot be sent to workers ({type(error).__name__}: "
            f'{error}). Define them in a module, or use the loop engine (run.engine = "loop")'
        ) from error
    return SharedPlan(rest, form.getvalue(), arrays)


def unloaded(shared: SharedPlan) -> Plan:
    """The plan again, its data where they are."""

    class Data(pickle.Unpickler):
        def persistent_load(self, told: Any) -> Tensor:
            place, dtype, *view = told
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # nobody writes into clients' data
                storage = torch.from_numpy(shared.arrays[place]).untyped_storage()
            return torch.empty(0, dtype=dtype).set_(storage, *view)

    plan: Plan = pickle.loads(shared.plan)
    return replace(plan, population=Data(io.BytesIO(shared.form)).load())
