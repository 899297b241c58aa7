"""A plan in a form that many worker processes can read while sharing one copy of the data."""

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

_NO_CLIENTS = Population((), "table", (), None, 0)


@dataclass(frozen=True)
class SharedPlan:
    """A plan in three parts: the plan without its data, the data's structure, and its arrays.

    The clients' samples are views of a few tensor storages. Each storage becomes one plain array,
    which can be put into memory that many processes share without a copy.
    """

    plan: bytes
    form: bytes
    arrays: list[Any]

    @property
    def size(self) -> int:
        """The size in bytes."""
        return len(self.plan) + len(self.form) + sum(int(a.nbytes) for a in self.arrays)


def share(plan: Plan, dumps: Callable[[Any], bytes]) -> SharedPlan:
    """Divide a portable plan into its parts; ``dumps`` pickles a user's own objects."""
    arrays: list[Any] = []
    indices: dict[int, int] = {}

    class Form(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            if type(value) is not Tensor:
                return None
            storage = value.untyped_storage()
            index = indices.setdefault(storage.data_ptr(), len(arrays))
            if index == len(arrays):
                arrays.append(torch.empty(0, dtype=torch.uint8).set_(storage).numpy())
            return index, value.dtype, value.storage_offset(), value.shape, value.stride()

    form = io.BytesIO()
    Form(form).dump(plan.population)
    try:
        rest = dumps(replace(plan, population=_NO_CLIENTS))
    except Exception as error:  # pickling runs the code of a user's objects, which may raise any
        raise EngineError(
            f"the model, loss or metrics cannot be sent to workers ({type(error).__name__}: "
            f'{error}). Define them in a module, or use the loop engine (run.engine = "loop")'
        ) from error
    return SharedPlan(rest, form.getvalue(), arrays)


def load_plan(shared: SharedPlan) -> Plan:
    """Put a plan together again; its data stay in the shared arrays."""

    class Data(pickle.Unpickler):
        def persistent_load(self, reference: Any) -> Tensor:
            index, dtype, *view = reference
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # the data is never written to
                storage = torch.from_numpy(shared.arrays[index]).untyped_storage()
            return torch.empty(0, dtype=dtype).set_(storage, *view)

    plan: Plan = pickle.loads(shared.plan)
    return replace(plan, population=Data(io.BytesIO(shared.form)).load())
