"""Where a client's data comes from: its own files, its own function, or part of a data set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from coterie.core.messages import ClientId
from coterie.core.schema import Config
from coterie.data import build_population, load
from coterie.data.clients import from_clients
from coterie.data.population import Population
from coterie.errors import ConfigError, DataError
from coterie.experiment.config import population_of
from coterie.registry import function_at


@dataclass(frozen=True)
class MemberData:
    """The data options of ``coterie join``.

    ``form`` is a format that ``coterie run`` reads (npz, npy, csv, text, image-folder), guessed
    from the path by default; ``options`` are the options of that format. ``loader`` is
    ``package.module:function``, which is called with the path. With ``simulated``, the client uses
    its part of the experiment's own data set, partitioned as the configuration says and read from
    the files under the path.
    """

    path: Path | None = None
    loader: str = ""
    form: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    simulated: bool = False

    def check(self) -> None:
        """Refuse options that contradict each other, and data that does not exist."""
        if self.simulated and (self.loader or self.form):
            raise ConfigError(
                "--simulated uses the experiment's own data: leave out --form and --data-loader"
            )
        if self.loader:
            function_at(self.loader, "--data-loader")
        elif not self.simulated:
            if self.path is None:
                raise ConfigError("give this client's data with --data PATH or --data-loader")
            if not self.path.exists():
                raise DataError(f"there is no file or folder {self.path}: correct --data")
            self._check_file(self.path)

    def _check_file(self, path: Path) -> None:
        """Read the data once, so that a mistake is told before connecting, with its flag."""
        form = self.form or _form_of(path)
        try:
            load(form, path, **self.options)
        except (ConfigError, DataError) as error:
            flag = "--option label=COLUMN" if form in ("csv", "text") else "--form or --option"
            raise type(error)(
                f"{error}. This client's data are {path}, read as {form}; give what describes them "
                f"with {flag} (coterie join)"
            ) from None

    def read(self, config: Config, id: ClientId) -> tuple[Population, int]:
        """Read a population that contains this client; return it and the client's index in it."""
        section = config.data
        if self.simulated:
            folder = None if self.path is None else str(self.path)
            data = replace(section, folder=folder)
            population = population_of(config.model_copy(update={"data": data}))
            if id >= len(population.clients):
                raise DataError(
                    f"client {id} has no part of the experiment's data, which is divided among "
                    f"{len(population.clients)} clients (data.clients)"
                )
            return population, id
        fractions: dict[str, Any] = {
            "test_fraction": section.test_fraction,
            "val_fraction": section.val_fraction,
        }
        if self.loader:
            try:
                entry = function_at(self.loader, "--data-loader")(self.path)
            except (Exception, SystemExit) as error:
                raise DataError(
                    f"{self.loader} failed with {type(error).__name__}: {error}"
                ) from error
            return from_clients([entry], **fractions, seed=config.run.seed), 0
        assert self.path is not None
        raw = load(self.form or _form_of(self.path), self.path, **self.options)
        if raw.kind == "text":
            raise DataError(
                "texts need a vocabulary that all clients share: map the words to numbers "
                "yourself, and load the result with --data-loader"
            )
        return (
            build_population(
                raw,
                clients=1,
                partition="iid",
                **fractions,
                seed=config.run.seed,
            ),
            0,
        )


def _form_of(path: Path) -> str:
    """The format of the data at a path, guessed from its name."""
    if path.is_dir():
        return "npy" if (path / "x.npy").is_file() else "image-folder"
    forms = {".npz": "npz", ".csv": "csv", ".tar": "image-folder", ".tgz": "image-folder"}
    form = forms.get(path.suffix.lower())
    if form is None:
        raise ConfigError(
            f"the format of {path} is unknown: give it with --form, or load the data with "
            "--data-loader package.module:function"
        )
    return form
