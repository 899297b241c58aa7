"""Privacy in a run: what is refused, how much noise a budget asks for, what was spent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from coterie.channel.channel import Channel
from coterie.channel.compression.coding import Coding
from coterie.channel.policy import Policy, cohort_size
from coterie.channel.privacy.accounting import Sampling, calibrate, sensible_delta
from coterie.channel.privacy.central_noise import Private
from coterie.channel.privacy.client import run_name
from coterie.channel.privacy.entropy import Entropy
from coterie.channel.privacy.local_noise import Local, downlink_of
from coterie.channel.privacy.secure_sums import Secure
from coterie.channel.privacy.settings import Privacy
from coterie.channel.privacy.spending import Account, Spending, account_of
from coterie.client.plan import Plan
from coterie.compose.layerwise import RESTS
from coterie.core.events import Event
from coterie.core.messages import Slot
from coterie.core.method import Method
from coterie.core.weights import Layout, Weights
from coterie.errors import ConfigError
from coterie.methods.docstrings import looked_at

EDGE = 0.1  # the part of δ that may go for cohorts that are just too small


def check_privacy(
    privacy: Privacy,
    method: Method,
    coding: Coding,
    policy: Policy,
    always_on: bool,
    layout: Layout,
    clients: int,
    clock: str = "none",
    optimizer: str = "sgd",
) -> None:
    """Refuse what does not go together, before anything is trained."""
    privacy.check()
    privacy.check_layout(layout)
    privacy.check_policy(policy, always_on, clients)
    if privacy.does("central") and clock == "wireless" and policy.deadline is not None:
        raise ConfigError(
            "run.deadline with clock.name = wireless lets one client make others late, on their "
            "common channel: ε does not account for that. Leave the deadline out"
        )
    if privacy.noised and method.needs_all_layers == RESTS:
        raise ConfigError(
            f"method {method.name} lets layers rest by numbers that clients report, which no noise "
            "hides: leave out method.layer_interval"
        )
    if privacy.noised and privacy.mechanism != "central" and method.mirrors:
        raise ConfigError(
            f"method {method.name} keeps its correction at the mean of its clients' own "
            f"corrections, and privacy.mechanism = {privacy.mechanism} clips and noises what they "
            "send of them: choose another method"
        )
    if privacy.noised and method.no_noise:
        raise ConfigError(f"method {method.name} {method.no_noise}")
    by_samples = privacy.secure and not privacy.noised and privacy.weights == "samples"
    if by_samples and optimizer.lower() != "sgd":
        raise ConfigError(
            f"train.optimizer = '{optimizer}' makes steps of nearly one length, and who counts by "
            "samples that the server knows can then be told from the others in a secure sum: set "
            "privacy.weights = equal, or train by sgd"
        )
    if privacy.secure and not coding.upwards.exact:
        raise ConfigError(
            f"wire.up = '{coding.up}' loses digits, and what masks hide must add up exactly: leave "
            "the codec out, or --secure"
        )
    if privacy.secure and privacy.same_orders and not coding.downwards.exact:
        raise ConfigError(
            f"wire.down = '{coding.down}' sends each client a change of the model that it holds. "
            "Members of a secure sum confirm to each other what they were sent, and the same "
            "change makes different models of different ones: leave the codec out, or give that "
            "up with privacy.same_orders = false"
        )
    if method.sees != "each":
        return
    if privacy.does("nbafl"):
        raise ConfigError(
            f"method {method.name} makes more than one mean of what clients send "
            f"({seen_by(method)}), and NbAFL's downlink noise is for one mean a round. Choose "
            "another method, or privacy.mechanism = local"
        )
    if privacy.secure and not privacy.reveal:
        seen = seen_by(method)
        consent = ", or let that through with privacy.reveal = 'final-layer'" * (
            "final layer" in seen
        )
        raise ConfigError(
            f"method {method.name} does not work under secure aggregation, which shows sums only: "
            f"{seen}. Choose one that asks for means (`coterie methods`){consent}"
        )
    if privacy.secure and "final layer" not in seen_by(method):
        raise ConfigError(
            f"method {method.name} needs more than the final layer that --reveal lets through: "
            f"{seen_by(method)}. Choose one that asks for means (`coterie methods`)"
        )
    if privacy.does("central"):
        raise ConfigError(
            f"method {method.name} groups or mixes clients by what each of them sent, which "
            f"moves the models of others too, and is not noised: {seen_by(method)}. Choose one "
            "that asks for means, or privacy.mechanism = local"
        )


def check_steps(privacy: Privacy, method: Method, steps: int | None) -> None:
    """Refuse sums that can be taken apart because one client makes more steps than the others."""
    if privacy.secure and method.same_steps and steps is None:
        raise ConfigError(
            f"method {method.name} {method.same_steps}: where one client makes more steps than the "
            "others, the two secure sums together tell what it sent. Set train.steps, so that all "
            "make the same number"
        )


def check_outliers(outliers: str, privacy: Privacy, method: Method) -> None:
    """Refuse a treatment of outliers that does not go with the run."""
    if outliers != "clip":
        return
    use = "Take run.outliers = reject"
    if method.no_clipping:
        raise ConfigError(
            f"run.outliers = 'clip' shortens what clients send, and method {method.name} "
            f"{method.no_clipping}. {use}, or another method"
        )
    if privacy.noised:
        raise ConfigError(
            "run.outliers = 'clip' shortens updates to what is usual in the cohort, so each client "
            f"decides about the others', which ε does not account for. {use}: noise has its own "
            "bound, privacy.clip"
        )
    if privacy.secure:
        raise ConfigError(
            "run.outliers = 'clip' shortens single updates, and under --secure the server sees "
            f"none. {use}, which then leaves out what clients themselves find not to be finite"
        )


def left_public(privacy: Privacy, method: Method) -> str:
    """What a method was told beforehand that ε does not cover, as a sentence; empty if nothing."""
    told = privacy.noised and method.takes_as_public
    return f"ε does not cover {method.takes_as_public}" if told else ""


def seen_by(method: Method) -> str:
    """What the server sees of single clients, in the method's own words."""
    return f"the server sees {looked_at(method) or 'the replies of each client'}"


def sampling_of(policy: Policy, clients: int) -> Sampling:
    """How a round's clients are drawn, as an accountant needs to know it."""
    cohort = cohort_size(policy.cohort, clients)
    kind = "poisson" if policy.sampling == "poisson" else "fixed"
    return Sampling("all" if cohort == clients else kind, clients, cohort)


def calibrated(privacy: Privacy, policy: Policy, clients: int, rounds: int) -> Privacy:
    """With all that a budget leaves open: δ, the noise for so many rounds, NbAFL's exposures."""
    if not privacy.noised:
        return privacy
    privacy.check()
    if clients < 2:
        raise ConfigError("noise hides one client among others, and there is one only")
    delta = sensible_delta(clients) if privacy.delta is None else privacy.delta
    if privacy.mechanism == "nbafl":
        most = privacy.aggregations or rounds
        seen = privacy.exposures or most
        if seen > most:
            raise ConfigError(
                f"privacy.exposures = {seen} uploads of a client cannot be seen in {most} rounds: "
                "give no more than there are"
            )
        return replace(privacy, delta=delta, exposures=seen, aggregations=most)
    if privacy.noise is not None:
        return replace(privacy, delta=delta)
    assert privacy.epsilon is not None
    sampling = sampling_of(policy, clients)
    if privacy.mechanism == "local":
        # A client may upload once more, when the method is set up.
        everybody = Sampling("all", clients, clients)
        noise = 2 * calibrate(everybody, privacy.epsilon, delta, rounds + 1)
        return replace(privacy, delta=delta, noise=noise)
    return replace(privacy, delta=delta, noise=calibrate(sampling, privacy.epsilon, delta, rounds))


class Guard:
    """What privacy adds to a run while it goes on: the federation, and the account."""

    def __init__(self, plan: Plan, policy: Policy, members: Sequence[int], rounds: int) -> None:
        self.plan, self.policy, self.members, self.rounds = plan, policy, members, rounds
        self.privacy = plan.privacy
        self.entropy = Entropy(self.privacy.randomness, plan.seed)
        self.spending = Spending(self.privacy.clip)
        self.account: Account | None = None
        if self.privacy.noised and self.privacy.mechanism != "nbafl":
            sampling = sampling_of(policy, len(members))
            self.account = account_of(self.privacy, sampling, rounds)
            if not self.account.fits(1):
                raise ConfigError(
                    f"privacy.epsilon = {self.privacy.epsilon:g} has no room for a single round "
                    f"with privacy.noise = {self.privacy.noise:g}: raise one of them"
                )
            self._refuse_edge(sampling)
        self._stage: Private | Local | None = None
        self._secure: Secure | None = None

    def _refuse_edge(self, sampling: Sampling) -> None:
        """Refuse cohorts whose size often decides whether there is a sum at all.

        There one client more brings in the parts of others too, which ε does not account for.
        """
        if not self.privacy.secure or sampling.kind != "poisson" or self.account is None:
            return
        from scipy.stats import binom

        others, least = sampling.clients - 1, self.privacy.min_group - 1
        decisive = self.rounds * float(binom.pmf(least, others, sampling.rate))
        if decisive > EDGE * self.account.delta:
            raise ConfigError(
                f"with cohorts of about {sampling.cohort} of {sampling.clients} clients, one "
                f"client decides over privacy.min_group = {self.privacy.min_group} with "
                f"probability {decisive:.2g} in {self.rounds} rounds; δ = {self.account.delta:.2g} "
                "does not cover that: use larger cohorts (run.cohort)"
            )

    def around(self, channel: Channel, agreement: str = "") -> Channel:
        """The door, showing what may be shown; real clients have agreed to something."""
        if channel.state.spending.bound:  # it goes on
            self.spending = channel.state.spending
        channel.state.spending = self.spending
        privacy, name = self.privacy, self.plan.method.name
        if privacy.secure:
            run = run_name(name, self.plan.seed)
            most = self.plan.method.sums
            self._secure = Secure(channel, privacy, self.plan.roster, run, name, most=most)
            self._secure.agreement = agreement
        if privacy.does("central"):
            expected = float(cohort_size(self.policy.cohort, len(self.members)))
            self._stage = Private(
                channel, privacy, expected, self.entropy, self.spending, self._secure, name
            )
        elif privacy.noised:
            self._stage = Local(
                channel, privacy, self.entropy, self.spending, self._fits, name, self._downlink()
            )
        channel.release = self._stage or self._secure or channel.release
        return channel

    def _fits(self, releases: int) -> bool:
        if self.privacy.does("nbafl"):
            return releases <= (self.privacy.aggregations or 0)
        return self.account is None or self.account.fits(releases)

    def _least_samples(self) -> int:
        return min(self.plan.train_sizes[c] for c in self.members)

    def _downlink(self) -> float:
        if self.privacy.mechanism != "nbafl":
            return 0.0
        return downlink_of(self.privacy, self._least_samples(), len(self.members))

    def begin(self, models: Mapping[Slot, Weights]) -> None:
        """Another round begins with these models."""
        if self._stage is not None:
            self._stage.begin(models)
        if self._secure is not None:
            self._secure.skipped = {}

    def event(self) -> Event:
        """What a round has to tell."""
        found: Event = {}
        if self._secure is not None and self._secure.skipped:
            found["withheld"] = dict(self._secure.skipped)
        if self.account is not None:
            found["privacy"] = {
                "epsilon": self.account.running(self.spending.releases),
                "delta": self.account.delta,
                "releases": self.spending.releases,
                "clip": self.spending.bound,
            }
        return found

    def over(self) -> str:
        """Why no further round fits into the budget, if so."""
        if self._fits(self.spending.releases + 1):
            return ""
        if self.account is None:
            return f"NbAFL's noise is for {self.privacy.aggregations} rounds"
        return f"the privacy budget of ε = {self.account.budget:g} has no room for another round"

    def summary(self) -> dict[str, Any]:
        """What the run ends with; nothing, if privacy was not asked for."""
        privacy = self.privacy
        if not privacy.on:
            return {}
        found: dict[str, Any] = {"secure": privacy.secure, "randomness": privacy.randomness}
        if privacy.reveal:
            found["reveal"] = privacy.reveal
        if privacy.noised:
            found["mechanism"] = privacy.mechanism
            found["clipping"], found["clip"] = privacy.clipping, self.spending.bound
        if self.account is not None:
            found |= self.account.report(self.spending.releases)
            found["budget"] = privacy.epsilon
        elif privacy.does("nbafl"):
            found |= {
                "epsilon": privacy.epsilon,
                "delta": privacy.delta,
                "exposures": privacy.exposures,
                "aggregations": privacy.aggregations,
                "downlink": self._downlink(),
                "accountant": "nbafl",
                "adjacency": "one sample of one client, by NbAFL's own assumptions",
            }
        return found
