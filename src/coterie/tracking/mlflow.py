"""A run of MLflow for each run of ours; one that is resumed is the same there too."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from coterie.core.tree import write_atomic
from coterie.results.rundir import RunDir, finite
from coterie.results.toml import to_toml
from coterie.tracking.values import flat, numbers

# Read when MLflow is imported and used; what the user has set stays.
_DEFAULTS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",  # nothing leaves the machine that nobody asked for
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # standard output is the result's
    "MLFLOW_ALLOW_FILE_STORE": "true",  # a folder needs no database and no server
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # a server that is away is said soon
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}
for _key, _value in _DEFAULTS.items():
    os.environ.setdefault(_key, _value)

import mlflow  # noqa: E402
from mlflow.entities import Metric, Param, RunTag  # noqa: E402
from mlflow.exceptions import MlflowException  # noqa: E402

STORE = "mlruns"  # beside the run directory, for all runs there
KEPT = "mlflow.json"  # in the run directory: which run of which server it is
_FILES = "run"  # what artifacts are kept under
_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_PARAMETERS, _METRICS, _LENGTH = 100, 1000, 500  # what all servers take at a time


class MLflow:
    """Parameters, metrics by round, tags and the run's tables."""

    def __init__(self, directory: Path | None, within: Path | None = None) -> None:
        self._directory, self._within = directory, within
        self._store: Path | None = None
        if not mlflow.is_tracking_uri_set():
            beside = within or (Path() if directory is None else directory.parent)
            self._store = beside.absolute() / STORE
        self._uri = mlflow.get_tracking_uri() if self._store is None else self._store.as_uri()
        self._logged = 0  # the last round that is there
        self._client: Any = None
        self._run = ""

    def begin(self, about: Mapping[str, Any]) -> None:
        """Make a run, or go on with the one of before; rounds that it lacks are made up for."""
        self._client = mlflow.MlflowClient(self._uri)
        if not self._take_up():
            self._create(about)
        known = self._client.get_run(self._run).data
        fresh = {k: v for k, v in flat(about["config"]).items() if k not in known.params}
        for part in _parts([Param(k, str(v)[:_LENGTH]) for k, v in fresh.items()], _PARAMETERS):
            self._client.log_batch(self._run, params=part)
        tags = {"method": about["method"], "seed": about["seed"], "status": "running"}
        tags["rounds"] = about["rounds"]  # a parameter cannot change; a resumed run may have more
        tags |= {f"version.{name}": found for name, found in about["versions"].items()}
        if self._directory is not None:
            tags["directory"] = str(self._directory.absolute())
        self._client.log_batch(self._run, tags=[RunTag(k, str(v)) for k, v in tags.items()])
        self._text("config.toml", to_toml(about["config"]))
        self._log(about["history"])

    def _take_up(self) -> bool:
        """Whether there is a run of before to go on with, at the same server."""
        if self._directory is None:
            return False
        try:
            kept = json.loads((self._directory / KEPT).read_text())
            if kept["tracking_uri"] != _without_secrets(self._uri):
                return False
            self._run = str(kept["run_id"])
            there = self._client.get_run(self._run)
        except (OSError, ValueError, KeyError, TypeError):
            return False
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":  # it was deleted there
                return False
            raise
        if there.info.lifecycle_stage != "active":
            return False
        self._client.update_run(self._run, status="RUNNING")
        # Every round has this metric. Rounds that come again have the same values.
        told = self._client.get_metric_history(self._run, "bytes/total")
        self._logged = max((metric.step for metric in told), default=0)
        return True

    def _create(self, about: Mapping[str, Any]) -> None:
        name = about["method"] if self._directory is None else self._directory.name
        if self._directory is not None and self._within is not None:
            name = self._directory.relative_to(self._within).as_posix()
        self._run = self._client.create_run(self._experiment(), run_name=name).info.run_id
        if self._directory is not None:
            kept = {"run_id": self._run, "tracking_uri": _without_secrets(self._uri)}
            write_atomic(self._directory / KEPT, json.dumps(kept).encode(), durable=False)

    def _experiment(self) -> str:
        if told := os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return told
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "coterie"
        lock = None
        if self._store is not None:  # runs of a sweep begin together, and share it
            self._store.mkdir(parents=True, exist_ok=True)
            lock = os.open(self._store / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            found = self._client.get_experiment_by_name(name)
            if found is not None:
                return str(found.experiment_id)
            return str(self._client.create_experiment(name))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            return str(self._client.get_experiment_by_name(name).experiment_id)
        finally:
            if lock is not None:
                os.close(lock)

    def event(self, event: Mapping[str, Any]) -> None:
        """A round's numbers, with the round as the step; and what became of newcomers."""
        if "event" not in event:
            self._log([event])
        elif event["event"] == "admission" and event.get("received"):
            known = self._client.get_run(self._run).data.metrics
            found = {
                f"newcomers/{name}": value
                for name, value in numbers({k: event[k] for k in ("received", "adapted")}).items()
            }
            if not known.keys() & found.keys():  # a finished run, resumed, admits them again
                self._send(_metrics(found, event["round"]))

    def _log(self, events: Iterable[Mapping[str, Any]]) -> None:
        fresh = [e for e in events if e["round"] > self._logged]
        self._send([m for e in fresh for m in _metrics(numbers(e), e["round"])])
        if fresh:
            self._logged = fresh[-1]["round"]

    def _send(self, metrics: list[Metric]) -> None:
        for part in _parts(metrics, _METRICS):
            self._client.log_batch(self._run, metrics=part)

    def end(self, status: str, summary: Mapping[str, Any]) -> None:
        """What the run came to, and how it ended."""
        if summary:
            self._text("result.json", json.dumps(finite(summary), indent=1))
            table = None if self._directory is None else RunDir(self._directory).table
            if table is not None and table.is_file():
                self._client.log_artifact(self._run, str(table), _FILES)
        self._client.set_tag(self._run, "status", summary.get("stopped") or status)
        self._client.set_terminated(self._run, _STATUS[status])

    def _text(self, name: str, text: str) -> None:
        self._client.log_text(self._run, text, f"{_FILES}/{name}")


def _without_secrets(uri: str) -> str:
    """An address without the name and password that may stand in it.

    >>> _without_secrets("https://me:secret@example.org:5000/x")
    'https://example.org:5000/x'
    """
    scheme, separator, rest = uri.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}" if separator else uri


def _metrics(found: Mapping[str, float], step: int) -> list[Metric]:
    now = int(time.time() * 1000)
    return [Metric(name, value, now, step) for name, value in found.items()]


def _parts(things: list[Any], most: int) -> Iterable[list[Any]]:
    return (things[start : start + most] for start in range(0, len(things), most))
