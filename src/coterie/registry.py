"""Registries: methods, data sets, models, codecs and other kinds of things, each by its name.

A thing is registered by a decorator where it is defined. A name is found in this order: what comes
with Coterie or was registered in this process, then what installed packages have under the entry
point ``coterie.<kind>s``. A user's own function may also be given by its place, as
``FILE.py:function`` or ``package.module:function``; ``admit`` loads it, and nothing else does:
``find`` never imports a module or opens a file because of a name.

What comes with Coterie is listed in ``index.json``, made by ``docs/index_of_names.py`` from the
decorators. So that a list of names can be shown without importing PyTorch, this module imports
nothing heavy, and a thing's module is imported when it is first asked for.
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
_FILE = "file:"  # how the name of a module begins that is a user's own file


# --- names ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Home:
    """The module that registers a thing when it is imported."""

    module: str


@dataclass(frozen=True)
class Own:
    """A user's own function: its place, and the SHA-256 of the file that it is defined in."""

    place: str
    digest: str


class Registry(MutableMapping[str, T], Generic[T]):
    """Things of one kind by name, such as methods.

    As a mapping it holds what comes with Coterie and what was registered in this process. ``given``
    are the arguments that Coterie fills in when it calls one; the others are parameters, for users
    to set. ``values`` says whether their values are checked against the signature's hints.
    """

    def __init__(
        self, kind: str, group: str, given: Sequence[str] = (), values: bool = True
    ) -> None:
        self.kind, self.group, self.given, self.values_checked = kind, group, tuple(given), values
        self.own: dict[str, Own] = {}  # names that stand for a user's own functions
        self.registered: dict[str, tuple[str, str]] = {}  # module and words, by name
        self._held: dict[str, T | _Home] = {}
        for name, row in self.index.items():
            self._held[name] = _Home(row["module"])

    @property
    def index(self) -> Mapping[str, Mapping[str, str]]:
        """What comes with Coterie: for each name its module, what it is, and more for lists."""
        found: Mapping[str, Mapping[str, str]] = read_index().get(self.group, {})
        return found

    def __getitem__(self, name: str) -> T:
        held = self._held[name]
        if isinstance(held, _Home):
            importlib.import_module(held.module)
            held = self._held[name]
        if isinstance(held, _Home):
            raise RuntimeError(
                f"index.json is out of date: {held.module} has no {self.kind} '{name}'. Make it "
                "again with docs/index_of_names.py"
            )
        return held

    def __setitem__(self, name: str, thing: T) -> None:
        self._held[name] = thing

    def __delitem__(self, name: str) -> None:
        del self._held[name]
        self.own.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, name: object) -> bool:
        return name in self._held

    def register(self, name: str, about: str = "", module: str = "") -> Callable[[F], F]:
        """A decorator that makes something known by this name.

        ``about`` is what lists say of it, by default the first paragraph of its docstring.
        ``module`` is where it is defined, if it does not say so itself.

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
            home = module or getattr(thing, "__module__", "")
            row, before = self.index.get(name), self.registered.get(name)
            ours = row is not None and row["module"] == home
            # A module that is loaded again may bring its own again; one of ours may have moved.
            again = before is not None and before[0] == home
            moved = home.startswith("coterie.") and isinstance(self._held.get(name), _Home)
            if name in self and not (ours or again or moved):
                raise ConfigError(f"there is a {self.kind} '{name}' already: choose another name")
            self.registered[name] = home, about or first_paragraph(inspect.getdoc(thing) or "")
            # A built-in that somebody replaced before its module was imported stays replaced.
            if not ours or isinstance(self._held.get(name), _Home):
                self._held[name] = cast(T, thing)
            return thing

        return decorate

    # --- finding them ---------------------------------------------------------------------------

    @property
    def installed(self) -> dict[str, EntryPoint]:
        """What installed packages bring, by name; nothing of theirs is imported."""
        return {e.name: e for e in entry_points(group=f"coterie.{self.group}")}

    def knows(self, name: object) -> bool:
        """Whether there is something of this name; no code is imported to find out."""
        return name in self._held or name in entry_points(group=f"coterie.{self.group}").names

    def find(self, name: str) -> T:
        """What has this name, or a ``ConfigError`` that offers the closest one."""
        if name in self._held:
            return self[name]
        installed = self.installed
        if name not in installed:
            raise ConfigError(unknown(self.kind, name, [*self._held, *installed]))
        try:
            return cast(T, installed[name].load())
        except Exception as error:  # whatever an installed package does when it is imported
            raise ConfigError(
                f"the {self.kind} '{name}' of an installed package ({installed[name].value}) "
                f"cannot be loaded: {type(error).__name__}: {error}"
            ) from None

    @property
    def everything(self) -> list[T]:
        """All of them, those of installed packages last."""
        more = [name for name in self.installed if name not in self._held]
        return [self.find(name) for name in (*self._held, *more)]

    def checked(self, name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """A user's parameters for the thing of this name; a ``ConfigError`` if one is wrong."""
        thing: Any = self.find(name)
        what = f"{self.kind} '{name}'"
        return checked(what, thing, parameters, self.given, self.values_checked)

    def make(self, name: str, parameters: Mapping[str, Any], **given: Any) -> Any:
        """What the thing of this name makes of a user's parameters.

        Of ``given``, Coterie's own arguments, it gets those that it takes.
        """
        thing: Any = self.find(name)
        values = self.checked(name, parameters)
        takes = inspect.signature(thing).parameters
        return thing(**{key: value for key, value in given.items() if key in takes}, **values)

    # --- a user's own functions -----------------------------------------------------------------

    def admit(self, text: str, option: str, digest: str | None = None) -> str:
        """Load a user's own function from its place, and know it by that from now on.

        What comes back is the place with an absolute path, which means the same in any folder. A
        text that is no place comes back as it is. ``option`` is what the user wrote it after. With
        a ``digest``, a file that is not as it was then is refused before it is loaded.

        Only for what a user typed or wrote: never for what came from another machine.
        """
        if not is_place(text):
            return text
        place = absolute(text)
        now = digest_of(place, option)
        if digest is not None and digest != now:
            raise ConfigError(
                f"{place.rpartition(':')[0]} has changed since this began (its SHA-256 was "
                f"{digest[:12]}…, and is {now[:12]}…): put it back as it was, or begin anew"
            )
        if self.own.get(place) != Own(place, now) or place not in self._held:
            self._held[place] = cast(T, function_at(place, option))
            self.own[place] = Own(place, now)
        return place

    def split(self, text: str) -> tuple[str, str]:
        """A name, or a place, and what is written after it.

        >>> CODECS.split("qsgd:levels=7"), CODECS.split("mine.py:sign:levels=3")
        (('qsgd', 'levels=7'), ('mine.py:sign', 'levels=3'))
        """
        head, _, rest = text.partition(":")
        function, _, after = rest.partition(":")
        place = f"{head}:{function}"
        return (place, after) if is_place(place) and not self.knows(head) else (head, rest)

    def know(self, name: str, place: str) -> None:
        """Load a user's own function under the name that it has in the process that sent it."""
        self._held[name] = cast(T, function_at(place, self.kind))
        self.own[name] = Own(place, digest_of(place, self.kind))

    def map(self, text: str, option: str) -> str:
        """Know a user's own function by a name: ``NAME=FILE.py:FUNCTION``; the name comes back."""
        name, equals, place = (part.strip() for part in text.partition("="))
        if not equals or not name or not place or any(sign in name for sign in ":/\\.+"):
            raise ConfigError(
                f"{option} {text}: write NAME=FILE.py:FUNCTION, as in mine=mine.py:mine"
            )
        if name in self.index:
            raise ConfigError(f"{option} {text}: '{name}' comes with Coterie: choose another name")
        if not is_place(place):
            raise ConfigError(
                f"{option} {place}: write package.module:function or FILE.py:function"
            )
        place = absolute(place)
        digest = digest_of(place, option)
        self._held[name] = cast(T, function_at(place, option))
        self.own[name] = Own(place, digest)
        return name


def first_paragraph(text: str) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join(text.strip().split("\n\n")[0].split())


@cache
def read_index() -> dict[str, Any]:
    """What comes with Coterie, by kind and name."""
    found: dict[str, Any] = json.loads(INDEX.read_text())
    return found


# --- parameters ----------------------------------------------------------------------------------


def checked(
    what: str,
    function: Callable[..., Any],
    parameters: Mapping[str, Any],
    given: Collection[str] = (),
    values: bool = True,
    hint: str = "",
) -> dict[str, Any]:
    """A user's parameters for a function, or a ``ConfigError`` that says which one is wrong.

    ``given`` are the arguments that are not the user's. ``values`` are checked against the hints of
    the signature as if they came from a file: a list is as good as a tuple. ``hint`` says how to
    give a parameter that is missing; ``{}`` stands for its name.

    >>> def waves(height: float, count: int = 2): ...
    >>> checked("the sea", waves, {"height": 3, "count": 4})
    {'height': 3.0, 'count': 4}
    >>> checked("the sea", waves, {"hight": 3.0})
    Traceback (most recent call last):
    coterie.errors.ConfigError: unknown parameter of the sea 'hight'; did you mean 'height'? ...
    """
    signature = inspect.signature(function).parameters
    takes = {
        name: p
        for name, p in signature.items()
        if name not in given and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    anything = any(p.kind is p.VAR_KEYWORD for p in signature.values())
    for name in parameters:
        if name not in takes and not (anything and name not in given):
            if takes:
                raise ConfigError(unknown(f"parameter of {what}", name, takes))
            raise ConfigError(f"{what} takes no parameters, but '{name}' was given: remove it")
    for name, parameter in takes.items():
        if parameter.default is parameter.empty and name not in parameters:
            more = f": {hint.format(name)}" if hint else ""
            raise ConfigError(f"{what} needs the parameter '{name}'{more}")
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
    except (NameError, TypeError):  # of a user's own, perhaps imported for type checkers only
        return {}


def _value(what: str, hint: Any, value: Any) -> Any:
    """A value as its hint wants it."""
    from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError

    try:
        wanted: TypeAdapter[Any] = TypeAdapter(hint)
    except PydanticSchemaGenerationError:  # no type that a file could hold
        return value
    try:
        # As JSON, in which configurations travel: a list is then as good as a tuple.
        return wanted.validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        raise ConfigError(f"{what}: {reasons(error)}") from None
    except TypeError as error:  # json's: NumPy's numbers, say
        raise ConfigError(f"{what}: {error}; give plain numbers and texts") from None


# --- a user's own code ---------------------------------------------------------------------------


def is_place(text: str) -> bool:
    """Whether a text says where a function is: ``FILE.py:function`` or ``package.module:function``.

    >>> is_place("nets/mine.py:net"), is_place("my.nets:net"), is_place("qsgd:levels=7")
    (True, True, False)
    """
    place, colon, function = text.rpartition(":")
    if not colon or not function.isidentifier():
        return False
    return place.endswith(".py") or all(part.isidentifier() for part in place.split("."))


def absolute(place: str) -> str:
    """The same place for a process that may be in another folder."""
    file, colon, function = place.rpartition(":")
    return f"{Path(file).resolve()}{colon}{function}" if file.endswith(".py") else place


def digest_of(place: str, option: str) -> str:
    """The SHA-256 of the file that a place is in; the module is not imported."""
    name = place.rpartition(":")[0]
    try:
        if not name.endswith(".py"):
            _look_in(os.getcwd())
            spec = importlib.util.find_spec(name)
            if spec is None:
                raise ModuleNotFoundError(f"No module named {name!r}")
            if spec.origin is None or not spec.has_location:
                raise ImportError(f"{name} has no file of source code")
            name = spec.origin
        return hashlib.sha256(Path(name).read_bytes()).hexdigest()
    except Exception as error:  # also whatever a parent package does when it is imported
        raise ConfigError(f"{option} {place}: {type(error).__name__}: {error}") from None


def function_at(place: str, option: str) -> Callable[..., Any]:
    """The user's own function, ``package.module:function`` or ``FILE.py:function``.

    A module is found as Python finds modules, or in the folder that one is in.
    """
    name, _, function = place.rpartition(":")
    if not is_place(place):
        raise ConfigError(f"{option} {place}: write package.module:function or FILE.py:function")
    try:
        if name.endswith(".py"):
            module = _from_file(Path(name))
        else:
            _look_in(os.getcwd())
            module = importlib.import_module(name)
        found = getattr(module, function)
    except Exception as error:  # whatever the user's module does when it is imported
        raise ConfigError(f"{option} {place}: {type(error).__name__}: {error}") from None
    if not callable(found):
        raise ConfigError(f"{option} {place}: that is no function")
    made: Callable[..., Any] = found
    return made


def _from_file(path: Path) -> ModuleType:
    """A file as a module, loaded again if it has changed; it can import what lies beside it."""
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
    """Reads a module from a file, and leaves no compiled copy beside it."""

    def __init__(self, path: str) -> None:
        self._path = path

    def get_filename(self, fullname: str) -> str:
        return self._path

    def get_data(self, path: str) -> bytes:
        return Path(path).read_bytes()


class _FileFinder(MetaPathFinder):
    """Finds a user's own file by the name of its module.

    The name says where the file is, so that other processes of this run can import it as well: what
    is pickled for a worker names a module, and so does the ``Source`` of a method.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(_FILE):
            return None
        file = fullname.removeprefix(_FILE).replace("%2E", ".").replace("%25", "%")
        _look_in(str(Path(file).parent))
        return importlib.util.spec_from_file_location(fullname, file, loader=_FileLoader(file))


sys.meta_path.append(_FileFinder())


def _look_in(folder: str) -> None:
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
"""All of them; data, models and the like check the values of their parameters themselves."""


def registry_of(group: str) -> Registry[Any]:
    """The registry of this entry point, as in ``methods``."""
    return next(each for each in REGISTRIES if each.group == group)


def own_places() -> list[tuple[str, str, str]]:
    """A user's own functions that this process knows: the registry, the name and the place."""
    return [(r.group, name, own.place) for r in REGISTRIES for name, own in r.own.items()]
