"""Registries: methods, data sets, models, codecs and other kinds of objects, by name.

Objects are registered by a decorator where they are defined. Names are looked up first among those
built into Coterie or registered in this process, and then among those of installed packages under
the entry point ``coterie.<kind>s``. Users can also refer to their own functions by location, as
``FILE.py:function`` or ``package.module:function``. Only ``admit`` loads them: ``find`` never
imports a module or opens a file because of a name.

The built-in names are listed in ``index.json``, which ``docs/index_of_names.py`` makes from the
decorators. So that names can be listed without importing PyTorch, this module imports nothing
heavy, and the module of an object is imported on first use.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast, get_type_hints

from coterie.errors import ConfigError, reasons, unknown

if TYPE_CHECKING:
    from torch import nn

    from coterie.channel.availability import Availability
    from coterie.channel.clocks import Clock
    from coterie.client.plan import Plan
    from coterie.core.engine import Engine
    from coterie.core.method import Method
    from coterie.data.partitions import Partition
    from coterie.data.raw import Array, RawData
    from coterie.experiment.experiment import Settings
    from coterie.report.catalogue import Picture, PictureOfSeveral
    from coterie.tracking import Tracker

T = TypeVar("T")
F = TypeVar("F")

INDEX = Path(__file__).with_name("index.json")
_FILE = "file:"  # the prefix of module names that stand for a user's own files


# --- names ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _NotLoaded:
    """An object that is not loaded yet, and the module that registers it when imported."""

    module: str


@dataclass(frozen=True)
class UserFunction:
    """A user's own function: its location, and the SHA-256 of the file that defines it."""

    place: str
    digest: str


class Registry(MutableMapping[str, T], Generic[T]):
    """Objects of one kind by name, such as methods.

    As a mapping, it contains the built-in objects and those registered in this process. ``given``
    are the arguments that Coterie itself passes when it calls an object; all others are parameters
    for users. ``values`` says whether the parameters' values are checked against type hints.
    """

    def __init__(
        self, kind: str, group: str, given: Sequence[str] = (), values: bool = True
    ) -> None:
        self.kind, self.group, self.given, self.values_checked = kind, group, tuple(given), values
        self.own: dict[str, UserFunction] = {}  # the users' own functions, by name
        self.registered: dict[str, tuple[str, str]] = {}  # module and description, by name
        self._things: dict[str, T | _NotLoaded] = {}
        for name, row in self.index.items():
            self._things[name] = _NotLoaded(row["module"])

    @property
    def index(self) -> Mapping[str, Mapping[str, str]]:
        """The built-in names, each with its module, description, and other columns of lists."""
        index: Mapping[str, Mapping[str, str]] = read_index().get(self.group, {})
        return index

    def __getitem__(self, name: str) -> T:
        thing = self._things[name]
        if isinstance(thing, _NotLoaded):
            importlib.import_module(thing.module)
            thing = self._things[name]
        if isinstance(thing, _NotLoaded):
            raise RuntimeError(
                f"index.json is out of date: {thing.module} has no {self.kind} '{name}'. Run "
                "docs/index_of_names.py to update it"
            )
        return thing

    def __setitem__(self, name: str, thing: T) -> None:
        self._things[name] = thing

    def __delitem__(self, name: str) -> None:
        del self._things[name]
        self.own.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._things)

    def __len__(self) -> int:
        return len(self._things)

    def __contains__(self, name: object) -> bool:
        return name in self._things

    def register(self, name: str, about: str = "", module: str = "") -> Callable[[F], F]:
        """A decorator that registers an object under a name.

        ``about`` is the description in lists, by default the first paragraph of the docstring.
        ``module`` is the defining module, if the object itself does not have it.

        >>> shapes = Registry[Callable[..., str]]("shape", "shapes")
        >>> @shapes.register("square")
        ... def square(size: int = 1) -> str:
        ...     return f"{size} x {size}"
        >>> shapes.make("square", {"size": 2})
        '2 x 2'
        >>> shapes.find("sqare")
        Traceback (most recent call last):
        coterie.errors.ConfigError: unknown shape 'sqare'; did you mean 'square'? Known: square
        """

        def decorate(thing: F) -> F:
            source = module or getattr(thing, "__module__", "")
            row, earlier = self.index.get(name), self.registered.get(name)
            built_in = row is not None and row["module"] == source
            # A reloaded module may register its objects again, and a built-in one may have moved.
            reloaded = earlier is not None and earlier[0] == source
            moved = source.startswith("coterie.") and isinstance(self._things.get(name), _NotLoaded)
            if name in self and not (built_in or reloaded or moved):
                raise ConfigError(f"there is already a {self.kind} '{name}': choose another name")
            self.registered[name] = source, about or first_paragraph(inspect.getdoc(thing) or "")
            # A built-in object that was replaced before its module was imported stays replaced.
            if not built_in or isinstance(self._things.get(name), _NotLoaded):
                self._things[name] = cast(T, thing)
            return thing

        return decorate

    # --- finding them ---------------------------------------------------------------------------

    @property
    def installed(self) -> dict[str, EntryPoint]:
        """The entry points of installed packages by name, without importing the packages."""
        return {e.name: e for e in entry_points(group=f"coterie.{self.group}")}

    def knows(self, name: object) -> bool:
        """Whether a name is known; no code is imported to find out."""
        return name in self._things or name in entry_points(group=f"coterie.{self.group}").names

    def find(self, name: str) -> T:
        """The named object, or a ``ConfigError`` that suggests the closest name."""
        if name in self._things:
            return self[name]
        installed = self.installed
        if name not in installed:
            raise ConfigError(unknown(self.kind, name, [*self._things, *installed]))
        try:
            return cast(T, installed[name].load())
        except Exception as error:  # an installed package may raise anything on import
            raise ConfigError(
                f"the {self.kind} '{name}' of an installed package ({installed[name].value}) "
                f"cannot be loaded: {type(error).__name__}: {error}"
            ) from None

    @property
    def everything(self) -> list[T]:
        """All objects, those of installed packages last."""
        installed_only = [name for name in self.installed if name not in self._things]
        return [self.find(name) for name in (*self._things, *installed_only)]

    def checked(self, name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Check a user's parameters for the named object; a ``ConfigError`` if any is wrong."""
        thing: Any = self.find(name)
        what = f"{self.kind} '{name}'"
        return checked(what, thing, parameters, self.given, self.values_checked)

    def make(self, name: str, parameters: Mapping[str, Any], **given: Any) -> Any:
        """Call the named object with a user's parameters.

        Of ``given``, the arguments that Coterie passes, it receives those that it accepts.
        """
        thing: Any = self.find(name)
        values = self.checked(name, parameters)
        accepted = inspect.signature(thing).parameters
        return thing(**{key: value for key, value in given.items() if key in accepted}, **values)

    # --- a user's own functions -----------------------------------------------------------------

    def admit(self, text: str, option: str, digest: str | None = None) -> str:
        """Load a user's own function from its location, and register it under that.

        Returns the location with an absolute path, which is valid in any folder; a text that is not
        a location is returned unchanged. ``option`` is the user's option, for errors. With a
        ``digest``, a file that has changed since is refused before it is loaded.

        Only for input of the user: never for messages from other machines.
        """
        if not is_place(text):
            return text
        location = absolute(text)
        current = digest_of(location, option)
        if digest is not None and digest != current:
            raise ConfigError(
                f"{location.rpartition(':')[0]} has changed since the run began (its SHA-256 was "
                f"{digest[:12]}… and is now {current[:12]}…): restore the file, or start a new run"
            )
        if (
            self.own.get(location) != UserFunction(location, current)
            or location not in self._things
        ):
            self._things[location] = cast(T, function_at(location, option))
            self.own[location] = UserFunction(location, current)
        return location

    def split(self, text: str) -> tuple[str, str]:
        """Split a text into a name or a location, and the parameters after it.

        >>> CODECS.split("qsgd:levels=7"), CODECS.split("mine.py:sign:levels=3")
        (('qsgd', 'levels=7'), ('mine.py:sign', 'levels=3'))
        """
        head, _, rest = text.partition(":")
        function, _, tail = rest.partition(":")
        location = f"{head}:{function}"
        return (location, tail) if is_place(location) and not self.knows(head) else (head, rest)

    def know(self, name: str, location: str) -> None:
        """Load a user's own function under the name that it has in the sending process."""
        self._things[name] = cast(T, function_at(location, self.kind))
        self.own[name] = UserFunction(location, digest_of(location, self.kind))

    def map(self, text: str, option: str) -> str:
        """Register a user's own function by ``NAME=FILE.py:FUNCTION``, and return the name."""
        name, equals, location = (part.strip() for part in text.partition("="))
        if not equals or not name or not location or any(sign in name for sign in ":/\\.+"):
            raise ConfigError(
                f"{option} {text}: write NAME=FILE.py:FUNCTION, as in lenet=networks.py:lenet"
            )
        if name in self.index:
            raise ConfigError(f"{option} {text}: '{name}' is built in: choose another name")
        if not is_place(location):
            raise ConfigError(
                f"{option} {location}: write package.module:function or FILE.py:function"
            )
        location = absolute(location)
        digest = digest_of(location, option)
        self._things[name] = cast(T, function_at(location, option))
        self.own[name] = UserFunction(location, digest)
        return name


def first_paragraph(text: str) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join(text.strip().split("\n\n")[0].split())


@cache
def read_index() -> dict[str, Any]:
    """The index of the built-in objects, by kind and name."""
    index: dict[str, Any] = json.loads(INDEX.read_text())
    return index


# --- parameters ----------------------------------------------------------------------------------


def checked(
    what: str,
    function: Callable[..., Any],
    parameters: Mapping[str, Any],
    given: Collection[str] = (),
    values: bool = True,
    hint: str = "",
) -> dict[str, Any]:
    """Check a user's parameters for a function; a ``ConfigError`` says which one is wrong.

    ``given`` are arguments that are not parameters. With ``values``, values are checked against the
    type hints as if they were read from a file, so that lists are accepted as tuples. ``hint`` says
    how to set a missing parameter; ``{}`` stands for its name.

    >>> def waves(height: float, count: int = 2): ...
    >>> checked("the sea", waves, {"height": 3, "count": 4})
    {'height': 3.0, 'count': 4}
    >>> checked("the sea", waves, {"hight": 3.0})
    Traceback (most recent call last):
    coterie.errors.ConfigError: unknown parameter of the sea 'hight'; did you mean 'height'? ...
    """
    signature = inspect.signature(function).parameters
    accepted = {
        name: p
        for name, p in signature.items()
        if name not in given and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    accepts_any = any(p.kind is p.VAR_KEYWORD for p in signature.values())
    for name in parameters:
        if name not in accepted and not (accepts_any and name not in given):
            if accepted:
                raise ConfigError(unknown(f"parameter of {what}", name, accepted))
            raise ConfigError(f"{what} takes no parameters, but '{name}' was given: remove it")
    for name, parameter in accepted.items():
        if parameter.default is parameter.empty and name not in parameters:
            advice = f": {hint.format(name)}" if hint else ""
            raise ConfigError(f"{what} needs the parameter '{name}'{advice}")
    if not (values and parameters):
        return dict(parameters)
    hints = _hints(function)
    return {
        name: _value(f"{what}: {name} = {value!r}", hints[name], value) if name in hints else value
        for name, value in parameters.items()
    }


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(inspect.unwrap(function), include_extras=True)
    except (NameError, TypeError):  # a user's hint may be imported only for type checkers
        return {}


def _value(what: str, hint: Any, value: Any) -> Any:
    """Convert a value to the type of its hint."""
    from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError

    try:
        adapter: TypeAdapter[Any] = TypeAdapter(hint)
    except PydanticSchemaGenerationError:  # not a type that files can contain
        return value
    try:
        # As JSON, like in configurations, so that lists are accepted as tuples.
        return adapter.validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        raise ConfigError(f"{what}: {reasons(error)}") from None
    except TypeError as error:  # from json, for example for NumPy's numbers
        raise ConfigError(f"{what}: {error}; use plain numbers and texts") from None


# --- a user's own code ---------------------------------------------------------------------------


def is_place(text: str) -> bool:
    """Whether a text is a location, ``FILE.py:function`` or ``package.module:function``.

    >>> is_place("nets/mine.py:net"), is_place("my.nets:net"), is_place("qsgd:levels=7")
    (True, True, False)
    """
    location, colon, function = text.rpartition(":")
    if not colon or not function.isidentifier():
        return False
    return location.endswith(".py") or all(part.isidentifier() for part in location.split("."))


def absolute(location: str) -> str:
    """The location with an absolute path, for processes in other folders."""
    file, colon, function = location.rpartition(":")
    return f"{Path(file).resolve()}{colon}{function}" if file.endswith(".py") else location


def digest_of(location: str, option: str) -> str:
    """The SHA-256 of the file of a location; the module is not imported."""
    name = location.rpartition(":")[0]
    try:
        if not name.endswith(".py"):
            _add_to_path(os.getcwd())
            spec = importlib.util.find_spec(name)
            if spec is None:
                raise ModuleNotFoundError(f"No module named {name!r}")
            if spec.origin is None or not spec.has_location:
                raise ImportError(f"{name} has no file of source code")
            name = spec.origin
        return hashlib.sha256(Path(name).read_bytes()).hexdigest()
    except Exception as error:  # a parent package may raise anything on import
        raise ConfigError(f"{option} {location}: {type(error).__name__}: {error}") from None


def function_at(location: str, option: str) -> Callable[..., Any]:
    """Load a user's own function, ``package.module:function`` or ``FILE.py:function``.

    Modules are searched on Python's path and in the current folder.
    """
    name, _, function = location.rpartition(":")
    if not is_place(location):
        raise ConfigError(f"{option} {location}: write package.module:function or FILE.py:function")
    try:
        if name.endswith(".py"):
            module = _module_of_file(Path(name))
        else:
            _add_to_path(os.getcwd())
            module = importlib.import_module(name)
        attribute = getattr(module, function)
    except Exception as error:  # the user's module may raise anything on import
        raise ConfigError(f"{option} {location}: {type(error).__name__}: {error}") from None
    if not callable(attribute):
        raise ConfigError(f"{option} {location}: '{function}' is not a function")
    loaded: Callable[..., Any] = attribute
    return loaded


def _module_of_file(path: Path) -> ModuleType:
    """Import a file as a module, again if it has changed; it can import files next to it."""
    path = path.resolve()
    name = _FILE + str(path).replace("%", "%25").replace(".", "%2E")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    loaded = sys.modules.get(name)
    if loaded is not None and vars(loaded).get("__digest__") != digest:
        del sys.modules[name]
    module = importlib.import_module(name)
    vars(module)["__digest__"] = digest
    return module


class _FileLoader(SourceLoader):
    """Load a module from a file, without writing a compiled copy next to it."""

    def __init__(self, path: str) -> None:
        self._path = path

    def get_filename(self, fullname: str) -> str:
        return self._path

    def get_data(self, path: str) -> bytes:
        return Path(path).read_bytes()


class _FileFinder(MetaPathFinder):
    """Find a user's own file by the name of its module.

    The name contains the path of the file, so that other processes of the run can import it as
    well: pickles for workers refer to modules by name, and so does the ``Source`` of a method.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(_FILE):
            return None
        file = fullname.removeprefix(_FILE).replace("%2E", ".").replace("%25", "%")
        _add_to_path(str(Path(file).parent))
        return importlib.util.spec_from_file_location(fullname, file, loader=_FileLoader(file))


sys.meta_path.append(_FileFinder())


def _add_to_path(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)


# --- the registries ------------------------------------------------------------------------------

METHODS: Registry[Callable[..., Method]] = Registry("method", "methods")
MODELS: Registry[Callable[..., nn.Module]] = Registry(
    "model", "models", given=("shape", "outputs"), values=False
)
SETS: Registry[Callable[..., RawData]] = Registry(
    "data set", "sets", given=("folder",), values=False
)
PARTITIONS: Registry[Callable[..., Partition]] = Registry(
    "partition", "partitions", given=("labels", "clients", "seed"), values=False
)
SHIFTS: Registry[Callable[..., tuple[Array, Array]]] = Registry(
    "shift", "shifts", given=("x", "y", "group", "scene"), values=False
)
CODECS: Registry[Callable[..., Any]] = Registry("codec", "codecs", given=("inner",))
CLOCKS: Registry[Callable[..., Clock | None]] = Registry(
    "clock", "clocks", given=("seed", "clients", "model_bytes")
)
AVAILABILITIES: Registry[Callable[..., Availability | None]] = Registry(
    "availability", "availabilities", given=("seed", "clients")
)
ENGINES: Registry[Callable[[Plan, Settings], Engine]] = Registry("engine", "engines")
PICTURES: Registry[Picture] = Registry("picture", "pictures")
COMPARED: Registry[PictureOfSeveral] = Registry("picture of several runs", "compared")
TRACKERS: Registry[Callable[..., Tracker]] = Registry(
    "tracker", "trackers", given=("directory", "within")
)

REGISTRIES: tuple[Registry[Any], ...] = (
    *(METHODS, MODELS, SETS, PARTITIONS, SHIFTS, CODECS, CLOCKS, AVAILABILITIES, ENGINES),
    *(PICTURES, COMPARED, TRACKERS),
)
"""All registries; data sets, models and others check the values of their parameters themselves."""


def registry_of(group: str) -> Registry[Any]:
    """The registry of an entry point, such as ``methods``."""
    return next(registry for registry in REGISTRIES if registry.group == group)


def own_places() -> list[tuple[str, str, str]]:
    """The users' own functions known to this process: registry, name and location."""
    return [(r.group, name, own.place) for r in REGISTRIES for name, own in r.own.items()]
