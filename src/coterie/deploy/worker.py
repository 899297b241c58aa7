"""The worker process of a client, which answers the messages that its SuperNode receives.

``coterie join`` starts it.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from coterie.deploy.allowed_names import map_names
from coterie.deploy.data import MemberData
from coterie.deploy.join import DONE
from coterie.deploy.member import FederationMember, Identity
from coterie.engines.flower.keys import read_client
from coterie.engines.flower.runtime import UNREACHABLE, NodeWorker, client_app, silence_flower
from coterie.errors import CoterieError

_POLL = 0.1  # seconds between two checks for a message
_PAUSE = 1.0  # seconds to wait while there is no SuperNode
_LINE = 2000  # characters of a line in the log


def work(settings: dict[str, Any]) -> int:
    """Answer messages until the process is ended or, with ``once``, until one run is over."""
    torch.set_num_threads(1)
    silence_flower()

    def tell(text: str) -> None:
        # The text may quote a server, so print one line without control characters.
        print("".join(c if c.isprintable() else "?" for c in text[:_LINE]), flush=True)

    map_names(settings["methods"], settings["models"])
    path = None if settings["path"] is None else Path(settings["path"])
    source = MemberData(
        path, settings["loader"], settings["form"], settings["options"], settings["simulated"]
    )
    who = Identity(settings["client"])
    if settings["keys"] is not None:
        who = Identity.of(read_client(Path(settings["keys"])))
    directory = Path(settings["directory"])
    device, secure, reveal = settings["device"], settings["secure"], settings["reveal"]
    member = FederationMember(directory, source, who, device, tell, secure, reveal)
    secret = Path(settings["secret"]).read_bytes()
    log = Path(settings["secret"]).with_name("supernode.log")

    def given_up(message: str) -> bool:
        # The SuperNode reports this in its log only.
        return log.exists() and f"Ignoring message {message}" in log.read_text(errors="replace")

    address = f"127.0.0.1:{settings['port']}"
    worker = NodeWorker(address, secret, client_app(member.answer), given_up)
    while True:
        try:
            if not worker.serve():
                time.sleep(_POLL)
        except UNREACHABLE:
            time.sleep(_PAUSE)
        if settings["once"] and member.kept is not None:
            return DONE


def main() -> int:
    """Run the worker; an unexpected error is one line for the user and a traceback in a file."""
    settings = json.loads(sys.argv[1])
    try:
        return work(settings)
    except CoterieError as error:
        print(error, flush=True)
        return error.exit_code
    except Exception as error:
        log = Path(settings["secret"]).with_name("worker-errors.log")
        with log.open("a") as file:
            file.write(traceback.format_exc())
        print(f"the worker failed with {type(error).__name__}: details in {log}", flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
