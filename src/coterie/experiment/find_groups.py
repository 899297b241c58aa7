"""Are there groups among one's clients? An answer before any run."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from torch import nn

from coterie.channel.exposure import sentences
from coterie.core.messages import ClientId
from coterie.data import Population, from_clients
from coterie.errors import ConfigError, DataError, RunDirError, unknown
from coterie.experiment.api import simulate
from coterie.lazy import named
from coterie.methods.group_evidence import ROUNDS, Asked, group_evidence
from coterie.results.findings import plausible, spoken
from coterie.results.notebook import Notebook, reading_of
from coterie.results.result import Result
from coterie.results.rundir import finite

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from coterie.report.reading import Reading

KINDS: tuple[str, ...] = get_args(Asked)
# Nothing is scored for its own sake: the question is answered by the method.
UNSCORED: Mapping[str, Any] = {"evaluate_every": 0, "adapt_epochs": 0}


def find_groups(
    clients: Sequence[Any] | Population,
    model: str | nn.Module | Callable[[], nn.Module] = "mlp",
    by: str = "final-layer",
    seeds: int = 3,
    trial: bool = True,
    *,
    probe_steps: int | str = "auto",
    test_fraction: float = 0.2,
    val_fraction: float = 0.1,
    seed: int = 0,
    **settings: Any,
) -> FoundGroups:
    """Find out whether clients fall into groups, how sure that is, and whether it pays.

    ``clients`` and ``model`` are as in ``simulate``. ``by`` is what is compared: "final-layer",
    "model", "gradient", "labels", "data", or "all" in turn; the comparison is made for ``seeds``
    divisions of the data into halves. With ``trial`` a short training tells whether groups that
    train apart have a lower validation loss than one model. ``probe_steps`` is how long clients
    train for the comparison; ``settings`` are those of ``simulate`` (``lr``, ``engine``, …).

    >>> import torch
    >>> x = torch.randn(8, 60, 3, generator=torch.Generator().manual_seed(0))
    >>> signs = [1, 1, 1, 1, -1, -1, -1, -1]
    >>> people = [(own, (sign * own[:, 0] > 0).long()) for own, sign in zip(x, signs)]
    >>> found = find_groups(people, "logistic", trial=False, engine="loop", lr=0.5)
    >>> list(found.groups.values())
    [0, 0, 0, 0, 1, 1, 1, 1]
    """
    check_by(by)
    if not isinstance(trial, bool):
        raise ConfigError(f"trial = {trial!r}: give True or False")
    population = (
        clients
        if isinstance(clients, Population)
        else from_clients(
            list(clients), test_fraction=test_fraction, val_fraction=val_fraction, seed=seed
        )
    )
    check_clients(population, by)
    method = group_evidence(by=by, seeds=seeds, steps=probe_steps, trial="auto" if trial else "off")  # type: ignore[arg-type]
    began = time.perf_counter()
    more = {"rounds": rounds_for(trial), "seed": seed, **UNSCORED, **settings}
    result = simulate(population, model, method, **more)
    return FoundGroups.of(result, time.perf_counter() - began)


def rounds_for(trial: bool) -> int:
    """How many rounds a run needs to answer; without a trial it ends before the first one."""
    return ROUNDS if trial else 1


def check_by(by: str) -> None:
    """Refuse a representation that there is not."""
    if by not in KINDS:
        raise ConfigError(unknown("representation to compare clients by", by, KINDS))


def check_clients(population: Population, by: str) -> None:
    """Refuse clients that nobody could group, with a sentence that says why."""
    people = population.clients
    if len(people) < 2:
        raise ConfigError("there is one client only: groups need two or more to compare")
    large = [c for c in people if len(c.train) > 1]
    if len(large) < 2:
        raise DataError(
            f"{len(large)} of {len(people)} clients have two training samples or more, which two "
            "halves need: give clients more data, or make fewer of them"
        )
    if by != "data" and population.classes is not None:
        first = large[0].train.y.reshape(-1)[0]
        if all(bool((c.train.y == first).all()) for c in people):
            raise DataError(
                f"all training samples are of one class ({population.classes[int(first)]}): there "
                "is nothing to learn, and nothing to compare but inputs (by data)"
            )
    if by != "labels":
        sample = large[0].train.x[0]
        if all(bool((c.train.x == sample).all()) for c in people):
            raise DataError(
                "all inputs are the same: nothing can be learnt from them. Check how the data are "
                "read, or compare labels (by labels)"
            )


@dataclass(frozen=True, repr=False)
class FoundGroups(Notebook):
    """Which clients belong together, how sure that is, and whether training apart pays.

    ``groups`` has a group for each client, ``certainty`` how clearly it belongs there: from −1 to
    1, below 0 if it sits between two groups. ``evidence`` is what the comparison found,
    ``stability`` how far its repetitions agree, ``trial`` the validation losses of a short
    training, if there was one; ``representations`` and ``meaning`` are there where all
    representations were compared. ``cost`` is in bytes, samples, rounds and seconds, ``exposure``
    what reached the server.
    """

    groups: Mapping[ClientId, int]
    names: Mapping[ClientId, str]
    certainty: Mapping[ClientId, float]
    evidence: Mapping[str, Any]
    stability: Mapping[str, Any]
    trial: Mapping[str, Any]
    representations: Mapping[str, Any]
    meaning: str
    cost: Mapping[str, Any]
    exposure: Sequence[str]
    result: Result = field(repr=False)

    @classmethod
    def of(cls, result: Result, seconds: float) -> FoundGroups:
        """From a run of the method group-evidence."""
        notes = result.begun["notes"]
        evidence = notes["evidence"]
        moved = result.summary["bytes"]
        tried = [e["notes"]["verdict"] for e in result.history if "verdict" in e.get("notes", {})]
        clients = result.plan.population.clients
        return cls(
            groups={int(c): g for c, g in notes["grouping"].items()},
            names={c: client.name or str(c) for c, client in enumerate(clients)},
            certainty=dict(zip(evidence["clients"], evidence["certainty"], strict=True)),
            evidence=evidence,
            stability=notes["stability"],
            trial=tried[-1] if tried else notes.get("verdict", {}),
            representations=notes.get("representations", {}),
            meaning=notes.get("meaning", ""),
            cost={
                "bytes": {"down": moved["down"], "up": moved["up"]},
                "samples": round(notes["samples"]),
                "rounds": result.rounds,
                "seconds": round(seconds, 1),
            },
            exposure=sentences(seen) if (seen := result.summary.get("exposure")) else [],
            result=result,
        )

    @property
    def members(self) -> dict[int, list[ClientId]]:
        """The clients of each group."""
        found: dict[int, list[ClientId]] = {}
        for client, group in sorted(self.groups.items()):
            found.setdefault(group, []).append(client)
        return dict(sorted(found.items()))

    @property
    def between(self) -> list[ClientId]:
        """The clients that sit between two groups: they are nearer to another than to their own."""
        return [c for c, certainty in self.certainty.items() if certainty < 0]

    @property
    def pays(self) -> bool | None:
        """Whether training apart had the lower validation loss; None if nobody knows."""
        return None if "chosen" not in self.trial else self.trial["chosen"] > 1

    @property
    def own_pay(self) -> bool | None:
        """Whether the evidence's own groups had a lower loss than one model; None if not known."""
        own = loss_of(self.trial, self.evidence["groups"]) if "losses" in self.trial else None
        return None if own is None else own < self.trial["losses"][0]

    @property
    def told_of_file(self) -> str:
        """What to say beside a file of the groups, where the trial took others."""
        own, chosen = self.evidence["groups"], self.trial.get("chosen", 0)
        if chosen in (0, own):
            return ""
        took = "one model" if chosen == 1 else f"{chosen} groups"
        return f" (the {own} of the evidence; the trial favoured {took})"

    @property
    def verdict(self) -> str:
        """The answer in one or two sentences."""
        return " ".join(s for s in (self._are_there(), self._does_it_pay()) if s)

    @property
    def advice(self) -> list[str]:
        """What to do next, in sentences."""
        return _advice(self)

    def _are_there(self) -> str:
        k, evidence, stable = self.evidence["groups"], self.evidence, self.stability
        same, draws = stable["same"], stable["draws"]
        agree = f"the same in {same} of {draws} draws" if draws > 1 else "one draw"
        if same < draws:
            counts = ", ".join(map(str, stable["groups"]))
            agree = f"but the {draws} draws disagree: {counts} groups"
            agree += f", agreement {stable['agreement']:.2f}"
        if k > 1:
            kappa = evidence["kappa"][str(k)]
            others = [str(n) for n in plausible(evidence) if n != k]
            unsure = f" {spoken(others)} groups predict about as well." if others else ""
            return f"There are {k} groups (reproducibility {kappa:.2f}, {agree}).{unsure}"
        if not evidence["enough"]:
            little, _, why = evidence["why"].partition(" to tell: ")
            return f"There is {little} to tell whether there are groups: {why}."
        return f"There is one group: {evidence['why']} ({agree})."

    def _does_it_pay(self) -> str:
        k, trial = self.evidence["groups"], self.trial
        if "losses" not in trial:
            if k == 1:
                return ""
            why = f"is not known: {trial['why'].partition(':')[0]}" if trial else "was not tried"
            return f"Whether training them apart pays {why}."
        one, apart = trial["losses"][0], loss_of(trial, k)
        chosen = trial["chosen"]
        best = loss_of(trial, chosen)
        if chosen == 1:
            if k == 1 or apart is None:
                return f"Training apart does not pay: {trial['why']}."
            clearly = "" if apart >= one else " clearly"
            return (
                f"Training them apart does not pay{clearly} after {self.cost['rounds']} rounds: "
                f"validation loss {apart:.2f} instead of {one:.2f}."
            )
        if chosen == k or apart is None or k == 1:
            them = "them" if chosen == k else f"{chosen} groups"
            return f"Training {them} apart pays: validation loss {best:.2f} instead of {one:.2f}."
        others = "each client alone has" if chosen == len(self.groups) else f"{chosen} groups have"
        if apart < one:
            return (
                f"Training them apart pays: validation loss {apart:.2f} instead of {one:.2f}; "
                f"after so short a training {others} {best:.2f}."
            )
        return (
            f"Training these groups apart does not pay: validation loss {apart:.2f} instead of "
            f"{one:.2f}; {others} {best:.2f}."
        )

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain JSON values, clients by name."""
        label = labels_of(self.names)
        parts: dict[str, Any] = {
            "verdict": self.verdict,
            "advice": self.advice,
            "groups": {label[c]: str(g) for c, g in sorted(self.groups.items())},
            "certainty": {label[c]: v for c, v in self.certainty.items()},
            "between": [label[c] for c in self.between],
            "stability": dict(self.stability),
            "evidence": dict(self.evidence),
            "trial": dict(self.trial),
            "cost": dict(self.cost),
            "exposure": list(self.exposure),
        }
        if self.representations:
            parts |= {"representations": dict(self.representations), "meaning": self.meaning}
        plain: dict[str, Any] = finite(parts)
        return plain

    def to_json(self, path: str | Path) -> Path:
        """Write all of it to a file, which the method known-groups reads its groups from."""
        place = Path(path)
        text = json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n"
        return written(place, text)

    def figure(self, name: str = "evidence") -> Figure:
        """A picture: "evidence", "client-map", "similarity", "verdict", or "distances-by-layer".

        The last one is there where whole models were compared (``by="model"``).
        """
        return super().figure(name)

    def _read(self) -> Reading:
        return reading_of(self.result)

    def __repr__(self) -> str:
        sizes = Counter(self.groups.values())
        listed = ", ".join(f"{g}: {n}" for g, n in sorted(sizes.items())[:12])
        more = f" and {len(sizes) - 12} more" if len(sizes) > 12 else ""
        lines = [self.verdict, f"clients in each group: {listed}{more}"]
        return "\n".join(["<FoundGroups", *(f"  {line}" for line in lines), ">"])

    def _repr_html_(self) -> str:
        return str(named("coterie.report.found_groups:card")(self))


def labels_of(names: Mapping[ClientId, str]) -> dict[ClientId, str]:
    """What clients are called in a file: by name where no two are alike, else by id."""
    if len(set(names.values())) == len(names) and all(names.values()):
        return dict(names)
    return {c: str(c) for c in names}


def loss_of(trial: Mapping[str, Any], k: int) -> float | None:
    """The validation loss of so many groups; of two such groupings, that of the evidence."""
    found = [v for count, v in zip(trial["cuts"], trial["losses"], strict=True) if count == k]
    return found[-1] if found else None


def written(place: Path, text: str) -> Path:
    """A file with this text; what cannot be written is a sentence."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunDirError(f"cannot write {place}: {error.strerror}") from error
    return place


# What says nothing about whether one model can serve all clients.
_SHALLOW = {"labels": "the labels", "data": "the inputs", "gradient": "the first gradients"}


def _advice(found: FoundGroups) -> list[str]:
    evidence, sentences = found.evidence, list[str]()
    small = evidence.get("too_small")
    if small:
        label = labels_of(found.names)
        listed = ", ".join(label[c] for c in small[:10])
        listed += f" and {len(small) - 10} more" if len(small) > 10 else ""
        sentences.append(
            f"Too few training samples for two halves: {listed}. They say nothing about groups, "
            "and were placed afterwards."
        )
    if evidence["groups"] == 1 and not evidence["enough"]:
        if "training" not in evidence["why"]:
            sentences.append(
                "Give clients more training data, or compare them by something that takes less: "
                "labels or data."
            )
    elif evidence["groups"] == 1 and evidence["by"] in _SHALLOW:
        sentences.append(
            f"So much for {_SHALLOW[evidence['by']]}; trained models may differ all the same. "
            "Compare by final-layer, or by all, before you train one model for all."
        )
    elif evidence["groups"] == 1:
        sentences.append(
            "Train one model for all. If you expect a difference nevertheless, compare by all."
        )
    if found.stability["same"] < found.stability["draws"]:
        sentences.append("Where draws disagree, more training data settle it; so may more seeds.")
    if set(found.trial) == {"why"} or (found.trial and "losses" not in found.trial):
        sentences.append("For a trial, set data.val_fraction (val_fraction in Python) above 0.")
    return sentences
