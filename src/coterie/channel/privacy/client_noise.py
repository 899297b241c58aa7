"""The noise that clients add: to their own uploads, or a share of it to a sum."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from coterie.channel.compression.coding import change_of, laid_on
from coterie.channel.privacy.client import ClientTerms
from coterie.channel.privacy.encoding import Floats, Form, Integers
from coterie.channel.privacy.entropy import Entropy
from coterie.channel.privacy.nbafl import clip_weights, uplink_sigma
from coterie.channel.privacy.noise import centred, clipped, discrete_gaussian
from coterie.channel.wire import digest_of
from coterie.core.messages import Array, ClientId, Upload

BIT = 1 << 8  # grid steps of a bit's half, so that its noise is fine enough


@dataclass(frozen=True)
class ClientNoise:
    """Adds local noise to uploads that are shown one by one."""

    own: ClientTerms

    def disturbed(
        self,
        client: ClientId,
        upload: Upload,
        received: Mapping[str, Array],
        body: Mapping[str, Any],
    ) -> Upload:
        """Clip an upload and add local noise to it.

        Its change is clipped or, by NbAFL's rules, the model itself. No metrics are sent with it.
        """
        if not upload.arrays:
            return replace(upload, metrics={})
        form = Form.of(upload.arrays, self.own.layout)
        bits = self.own.privacy.bits
        if self.own.privacy.mechanism == "nbafl":
            whole, sigma = self._nbafl(form.flat(upload.arrays))
            noise = self._local_noise(client, body, whole, sigma)
            return Upload(form.arrays(np.ldexp((whole + noise).astype(np.float64), -bits)))
        base = {n: received[of] for n, of in upload.delta_of.items() if of}
        own = {n: change_of(a, base.get(n)) for n, a in upload.arrays.items()}
        whole, _ = clipped(form.flat(own), self.own.privacy.clip, bits)
        sigma = (self.own.privacy.noise or 0.0) * self.own.privacy.clip * 2.0**bits
        whole = whole + self._local_noise(client, body, whole, sigma)
        back = form.arrays(np.ldexp(whole.astype(np.float64), -bits))
        sent = {n: laid_on(a, base.get(n)) for n, a in back.items()}
        return Upload(sent, {}, upload.delta_of)

    def _local_noise(
        self, client: ClientId, body: Mapping[str, Any], whole: Integers, sigma: float
    ) -> Integers:
        """Draw noise that is the same for the same order and upload, and different for all others.

        So repeated requests do not average the noise away, and other uploads, such as from an
        earlier state, do not share it, since their difference would then have no noise.
        """
        name = f"{digest_of(body['message'])} {hashlib.sha256(whole.tobytes()).hexdigest()}"
        if self.own.privacy.randomness == "simulated":
            random = self.own.entropy.stream("local noise", client, name)
        else:
            random = Entropy("simulated").stream(self.own.roster.private(client).hex(), name)
        return discrete_gaussian(sigma, len(whole), random)

    def _nbafl(self, flat: Floats) -> tuple[Integers, float]:
        """A clipped model on the grid, and the standard deviation of its noise."""
        own, bits = self.own.privacy, self.own.privacy.bits
        assert own.epsilon is not None
        assert own.delta is not None
        assert own.exposures is not None
        kept = np.rint(np.ldexp(clip_weights(flat, own.clip), bits)).astype(np.int64)
        sigma = uplink_sigma(
            own.clip, self.own.least_samples, own.epsilon, own.delta, own.exposures
        )
        return kept, sigma * 2.0**bits


def noised(
    flat: np.ndarray[Any, Any],
    noise: Mapping[str, float],
    bits: int,
    share: float,
    random: Any,
) -> np.ndarray[Any, Any]:
    """Clip a change, round it to the grid, and append its bit; add a share of the noise to each."""
    bound = noise["clip"]
    whole, norm = clipped(flat, bound, bits)
    sigma = share * noise["multiplier"] * bound * 2.0**bits
    bit = round(centred(norm, bound) * 2 * BIT) if noise["bits"] else 0  # else nobody asks for it
    bit += int(discrete_gaussian(share * noise["bits"] * 2 * BIT, 1, random)[0])
    return np.append(whole + discrete_gaussian(sigma, len(whole), random), bit)
