"""The process that answers a SuperNode's messages; ``coterie join`` starts it."""

from __future__ import annotations

import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from coterie.deploy.allowed_names import map_names
from coterie.deploy.data import Source
from coterie.deploy.join import DONE
from coterie.deploy.member import Identity, Member
from coterie.engines.flower.keys import read_client
from coterie.engines.flower.runtime import AWAY, Desk, client_app, quiet
from coterie.errors import CoterieError

_LOOK = 0.1  # seconds between two looks for a message
_PAUSE = 1.0  # while there is no SuperNode
_LINE = 2000  # characters of a line in the log


def work(told: dict[str, Any]) -> int:
    """Answer messages until the user ends it, or until one run is over if that is enough."""
    torch.set_num_threads(1)
    quiet()

    def tell(text: str) -> None:
        # Parts of it may be a server's words: one line, of signs that do nothing to a terminal.
        print("".join(c if c.isprintable() else "?" for c in text[:_LINE]), flush=True)

    map_names(told["methods"], told["models"])
    path = None if told["path"] is None else Path(told["path"])
    source = Source(path, told["loader"], told["form"], told["options"], told["simulated"])
    who = Identity(told["client"])
    if told["keys"] is not None:
        who = Identity.of(read_client(Path(told["keys"])))
    place = Path(told["directory"])
    member = Member(place, source, who, told["device"], tell, told["secure"], told["reveal"])
    secret = Path(told["secret"]).read_bytes()
    log = Path(told["secret"]).with_name("supernode.log")

    def given_up(message: str) -> bool:
        """The SuperNode says so in its log, and nowhere else."""
        return log.exists() and f"Ignoring message {message}" in log.read_text(errors="replace")

    desk = Desk(f"127.0.0.1:{told['port']}", secret, client_app(member.answer), given_up)
    while True:
        try:
            if not desk.serve():
                time.sleep(_LOOK)
        except AWAY:
            time.sleep(_PAUSE)
        if told["once"] and member.kept is not None:
            return DONE


def main() -> int:
    """The same; what nobody foresaw is a sentence for the user, and the rest is in a file."""
    told = json.loads(sys.argv[1])
    try:
        return work(told)
    except CoterieError as error:
        print(error, flush=True)
        return error.exit_code
    except Exception as error:
        place = Path(told["secret"]).with_name("worker-errors.log")
        with place.open("a") as file:
            file.write(traceback.format_exc())
        print(f"the worker failed with {type(error).__name__}: more in {place}", flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
