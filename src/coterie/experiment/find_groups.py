"""Find out whether clients fall into groups, before running a method on them."""

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
from coterie.compose.trial import NOBODY
from coterie.core.messages import ClientId
from coterie.data import Population, from_clients
from coterie.errors import ConfigError, DataError, RunDirError, unknown
from coterie.experiment.api import simulate
from coterie.lazy import named
from coterie.methods.group_evidence import ROUNDS, Asked, group_evidence
from coterie.results.findings import plausible, spoken
from coterie.results.notebook import Notebook, reading_of
from coterie.results.result import Result
from coterie.results.rundir import without_nan

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from coterie.report.reading import Reading

KINDS: tuple[str, ...] = get_args(Asked)
# The method itself finds the groups: no scores are needed.
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
    """Find out whether clients fall into groups, how certain that is, and whether it pays.

    ``clients`` and ``model`` are as in ``simulate``. ``by`` says what to compare: "final-layer",
    "model", "gradient", "labels", "data", or "all" of these; the comparison is repeated for
    ``seeds`` splits of the data into halves. With ``trial`` a short training shows whether groups
    that train separately reach a lower validation loss than one model. ``probe_steps`` are the
    local training steps before clients are compared; ``settings`` are those of ``simulate``
    (``lr``, ``engine``, …).

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
    check_groupable(population, by)
    method = group_evidence(by=by, seeds=seeds, steps=probe_steps, trial="auto" if trial else "off")  # type: ignore[arg-type]
    started = time.perf_counter()
    run_settings = {"rounds": rounds_for(trial), "seed": seed, **UNSCORED, **settings}
    result = simulate(population, model, method, **run_settings)
    return FoundGroups.of(result, time.perf_counter() - started)


def rounds_for(trial: bool) -> int:
    """The rounds to run; without a trial the run ends before the first one."""
    return ROUNDS if trial else 1


def check_by(by: str) -> None:
    """Refuse an unknown representation."""
    if by not in KINDS:
        raise ConfigError(unknown("representation to compare clients by", by, KINDS))


def check_groupable(population: Population, by: str) -> None:
    """Refuse clients that cannot be grouped, and say why."""
    clients = population.clients
    if len(clients) < 2:
        raise ConfigError("there is only one client: finding groups needs at least two")
    large = [c for c in clients if len(c.train) > 1]
    if len(large) < 2:
        raise DataError(
            f"{len(large)} of {len(clients)} clients have at least two training samples, as two "
            "halves need: give clients more data, or make fewer clients"
        )
    if by != "data" and population.classes is not None:
        first = large[0].train.y.reshape(-1)[0]
        if all(bool((c.train.y == first).all()) for c in clients):
            raise DataError(
                f"all training samples are of one class ({population.classes[int(first)]}): there "
                "is nothing to learn, and only inputs can be compared (by data)"
            )
    if by != "labels":
        sample = large[0].train.x[0]
        if all(bool((c.train.x == sample).all()) for c in clients):
            raise DataError(
                "all inputs are identical: nothing can be learnt from them. Check how the data are "
                "read, or compare labels (by labels)"
            )


@dataclass(frozen=True, repr=False)
class FoundGroups(Notebook):
    """The groups of clients, how certain they are, and whether separate training pays.

    ``groups`` has the group of each client, and ``certainty`` how clearly the client belongs to it:
    from −1 to 1, below 0 if it is between two groups. ``evidence`` is the result of the comparison,
    ``stability`` the agreement of its repetitions, and ``trial`` the validation losses of a short
    training, if there was one. ``representations`` and ``meaning`` are set if all representations
    were compared. ``cost`` is in bytes, samples, rounds and seconds; ``exposure`` says what the
    server received.
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
        """The groups that a run of the method ``group-evidence`` found."""
        notes = result.begun["notes"]
        evidence = notes["evidence"]
        bytes_moved = result.summary["bytes"]
        verdicts = [
            e["notes"]["verdict"] for e in result.history if "verdict" in e.get("notes", {})
        ]
        clients = result.plan.population.clients
        return cls(
            groups={int(c): g for c, g in notes["grouping"].items()},
            names={c: client.name or str(c) for c, client in enumerate(clients)},
            certainty=dict(zip(evidence["clients"], evidence["certainty"], strict=True)),
            evidence=evidence,
            stability=notes["stability"],
            trial=verdicts[-1] if verdicts else notes.get("verdict", {}),
            representations=notes.get("representations", {}),
            meaning=notes.get("meaning", ""),
            cost={
                "bytes": {"down": bytes_moved["down"], "up": bytes_moved["up"]},
                "samples": round(notes["samples"]),
                "rounds": result.rounds,
                "seconds": round(seconds, 1),
            },
            exposure=sentences(exposure) if (exposure := result.summary.get("exposure")) else [],
            result=result,
        )

    @property
    def members(self) -> dict[int, list[ClientId]]:
        """The clients of each group."""
        members: dict[int, list[ClientId]] = {}
        for client, group in sorted(self.groups.items()):
            members.setdefault(group, []).append(client)
        return dict(sorted(members.items()))

    @property
    def between(self) -> list[ClientId]:
        """The clients between two groups: they are nearer to another group than to their own."""
        return [c for c, certainty in self.certainty.items() if certainty < 0]

    @property
    def pays(self) -> bool | None:
        """Whether separate training had the lower validation loss; None if unknown."""
        return None if "chosen" not in self.trial else self.trial["chosen"] > 1

    @property
    def own_pay(self) -> bool | None:
        """Whether the evidence's groups had a lower loss than one model; None if unknown."""
        loss = loss_of(self.trial, self.evidence["groups"]) if "losses" in self.trial else None
        return None if loss is None else loss < self.trial["losses"][0]

    @property
    def says_little(self) -> bool:
        """Whether there is one group, but trained models may still differ."""
        return self.evidence["groups"] == 1 and self.evidence["by"] in _SHALLOW

    @property
    def told_of_file(self) -> str:
        """A remark on a file of the groups, if the trial favoured other groups."""
        in_evidence, chosen = self.evidence["groups"], self.trial.get("chosen", 0)
        if chosen in (0, in_evidence):
            return ""
        favoured = "one model" if chosen == 1 else f"{chosen} groups"
        return f" (the {in_evidence} of the evidence; the trial favoured {favoured})"

    @property
    def verdict(self) -> str:
        """The answer in one or two sentences."""
        return " ".join(s for s in (self._are_there(), self._does_it_pay()) if s)

    @property
    def advice(self) -> list[str]:
        """What to do next, in sentences."""
        return _advice(self)

    def _are_there(self) -> str:
        k, evidence, stability = self.evidence["groups"], self.evidence, self.stability
        same, draws = stability["same"], stability["draws"]
        agreement = f"the same in {same} of {draws} draws" if draws > 1 else "one draw"
        if same < draws:
            counts = ", ".join(map(str, stability["groups"]))
            agreement = f"but the {draws} draws disagree: {counts} groups"
            agreement += f", agreement {stability['agreement']:.2f}"
        if k > 1:
            kappa = evidence["kappa"][str(k)]
            others = [str(n) for n in plausible(evidence) if n != k]
            unsure = f" {spoken(others)} groups predict about as well." if others else ""
            return f"There are {k} groups (reproducibility {kappa:.2f}, {agreement}).{unsure}"
        if not evidence["enough"]:
            what_lacks, _, reason = evidence["why"].partition(" to tell: ")
            return f"There is {what_lacks} to tell whether there are groups: {reason}."
        return f"There is one group: {evidence['why']} ({agreement})."

    def _does_it_pay(self) -> str:
        k, trial = self.evidence["groups"], self.trial
        if "losses" not in trial:
            if k == 1:
                return ""
            why = f"is not known: {trial['why'].partition(':')[0]}" if trial else "was not tried"
            return f"Whether training them separately pays off {why}."
        loss_of_one, loss_apart = trial["losses"][0], loss_of(trial, k)
        chosen = trial["chosen"]
        lowest = loss_of(trial, chosen)
        if chosen == 1:
            if k == 1 or loss_apart is None:
                return f"Training separately does not pay off: {trial['why']}."
            clearly = "" if loss_apart >= loss_of_one else " clearly"
            return (
                f"Training them separately does not{clearly} pay off after {self.cost['rounds']} "
                f"rounds: validation loss {loss_apart:.2f} instead of {loss_of_one:.2f}."
            )
        if chosen == k or loss_apart is None or k == 1:
            them = "them" if chosen == k else f"{chosen} groups"
            return (
                f"Training {them} separately pays off: validation loss {lowest:.2f} instead of "
                f"{loss_of_one:.2f}."
            )
        others = "each client alone has" if chosen == len(self.groups) else f"{chosen} groups have"
        if lowest is not None and loss_apart <= lowest < loss_of_one:
            return (
                f"Training them separately pays off: validation loss {loss_apart:.2f} instead "
                f"of {loss_of_one:.2f}; {others} {lowest:.2f}, which is not clearly more."
            )
        if loss_apart < loss_of_one:
            return (
                f"Training them separately pays off: validation loss {loss_apart:.2f} instead of "
                f"{loss_of_one:.2f}; after so short a training {others} {lowest:.2f}."
            )
        return (
            f"Training these groups separately does not pay off: validation loss "
            f"{loss_apart:.2f} instead of {loss_of_one:.2f}; {others} {lowest:.2f}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values, clients by name."""
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
        plain: dict[str, Any] = without_nan(parts)
        return plain

    def to_json(self, path: str | Path) -> Path:
        """Write everything to a JSON file, from which the method known-groups reads the groups."""
        target = Path(path)
        text = json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n"
        return written(target, text)

    def figure(self, name: str = "evidence") -> Figure:
        """A figure: "evidence", "client-map", "similarity", "verdict", or "distances-by-layer".

        The last one exists if whole models were compared (``by="model"``).
        """
        return super().figure(name)

    def _read(self) -> Reading:
        return reading_of(self.result)

    def __repr__(self) -> str:
        sizes = Counter(self.groups.values())
        listed = ", ".join(f"{g}: {n}" for g, n in sorted(sizes.items())[:12])
        remainder = f" and {len(sizes) - 12} more" if len(sizes) > 12 else ""
        lines = [self.verdict, f"clients in each group: {listed}{remainder}"]
        return "\n".join(["<FoundGroups", *(f"  {line}" for line in lines), ">"])

    def _repr_html_(self) -> str:
        return str(named("coterie.report.found_groups:card")(self))


def labels_of(names: Mapping[ClientId, str]) -> dict[ClientId, str]:
    """The labels of clients in a file: their names if all are distinct, else their ids."""
    if len(set(names.values())) == len(names) and all(names.values()):
        return dict(names)
    return {c: str(c) for c in names}


def loss_of(trial: Mapping[str, Any], k: int) -> float | None:
    """The validation loss of ``k`` groups; of two such groupings, that of the evidence."""
    losses = [v for count, v in zip(trial["cuts"], trial["losses"], strict=True) if count == k]
    return losses[-1] if losses else None


def written(path: Path, text: str) -> Path:
    """Write a text file; an error names the file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunDirError(f"cannot write {path}: {error.strerror}") from error
    return path


# Representations that do not show whether one model can serve all clients.
_SHALLOW = {"labels": "the labels", "data": "the inputs", "gradient": "the first gradients"}


def _advice(groups: FoundGroups) -> list[str]:
    evidence, sentences = groups.evidence, list[str]()
    small = evidence.get("too_small")
    if small:
        label = labels_of(groups.names)
        listed = ", ".join(label[c] for c in small[:10])
        listed += f" and {len(small) - 10} more" if len(small) > 10 else ""
        sentences.append(
            f"Too few training samples for two halves: {listed}. They were not compared, and "
            "joined a group afterwards."
        )
    if evidence["groups"] == 1 and not evidence["enough"]:
        if "training" not in evidence["why"]:
            sentences.append(
                "Give clients more training data, or compare them by labels or data, which takes "
                "less."
            )
    elif groups.says_little:
        sentences.append(
            f"This concerns {_SHALLOW[evidence['by']]} only; trained models may still differ. "
            "Compare by final-layer, or by all, before you train one model for all."
        )
    elif evidence["groups"] == 1:
        sentences.append(
            "Train one model for all. If you still expect differences, compare by all."
        )
    if groups.stability["same"] < groups.stability["draws"]:
        sentences.append("The draws disagree: more training data help, and more seeds may.")
    if groups.trial.get("why") == NOBODY:
        sentences.append("To have a trial, set data.val_fraction (val_fraction in Python) above 0.")
    return sentences
