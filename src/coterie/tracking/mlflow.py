"""The MLflow tracker: one MLflow run for each run, also after a resume."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from coterie.core.tree import write_atomic
from coterie.results.rundir import RunDir, without_nan
from coterie.results.toml import to_toml
from coterie.tracking.values import flat, numbers

# Environment variables of MLflow, unless the user has set them.
_DEFAULTS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",  # send nothing that the user did not ask for
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # standard output is for results
    "MLFLOW_ALLOW_FILE_STORE": "true",  # a folder needs no database and no server
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # report an unreachable server soon
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}
for _key, _value in _DEFAULTS.items():
    os.environ.setdefault(_key, _value)

import mlflow  # noqa: E402
from mlflow.entities import Metric, Param, RunTag  # noqa: E402
from mlflow.exceptions import MlflowException  # noqa: E402

STORE = "mlruns"  # beside the run directory, for all runs there
KEPT = "mlflow.json"  # in the run directory: the MLflow run and its server
_FILES = "run"  # the folder of artifacts
_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_PARAMETERS, _METRICS, _LENGTH = 100, 1000, 500  # limits of a request that all servers accept


class MLflow:
    """Logs parameters, metrics by round, tags and the tables of a run."""

    def __init__(self, directory: Path | None, within: Path | None = None) -> None:
        self._directory, self._within = directory, within
        self._store: Path | None = None
        if not mlflow.is_tracking_uri_set():
            beside = within or (Path() if directory is None else directory.parent)
            self._store = beside.absolute() / STORE
        self._uri = mlflow.get_tracking_uri() if self._store is None else self._store.as_uri()
        self._logged = 0  # the last logged round
        self._client: Any = None
        self._run = ""

    def begin(self, about: Mapping[str, Any]) -> None:
        """Create an MLflow run or continue the earlier one, and log rounds that it lacks."""
        self._client = mlflow.MlflowClient(self._uri)
        if not self._take_up():
            self._create(about)
        logged = self._client.get_run(self._run).data
        new = {k: v for k, v in flat(about["config"]).items() if k not in logged.params}
        for part in _parts([Param(k, str(v)[:_LENGTH]) for k, v in new.items()], _PARAMETERS):
            self._client.log_batch(self._run, params=part)
        tags = {"method": about["method"], "seed": about["seed"], "status": "running"}
        tags["rounds"] = about["rounds"]  # a parameter cannot change; a resumed run may have more
        tags |= {f"version.{name}": version for name, version in about["versions"].items()}
        if self._directory is not None:
            tags["directory"] = str(self._directory.absolute())
        self._client.log_batch(self._run, tags=[RunTag(k, str(v)) for k, v in tags.items()])
        self._text("config.toml", to_toml(about["config"]))
        self._log(about["history"])

    def _take_up(self) -> bool:
        """Continue the earlier MLflow run, if there is one on the same server."""
        if self._directory is None:
            return False
        try:
            kept = json.loads((self._directory / KEPT).read_text())
            if kept["tracking_uri"] != _without_secrets(self._uri):
                return False
            self._run = str(kept["run_id"])
            run = self._client.get_run(self._run)
        except (OSError, ValueError, KeyError, TypeError):
            return False
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":  # it was deleted on the server
                return False
            raise
        if run.info.lifecycle_stage != "active":
            return False
        self._client.update_run(self._run, status="RUNNING")
        # Every round has this metric. Repeated rounds have the same values.
        history = self._client.get_metric_history(self._run, "bytes/total")
        self._logged = max((metric.step for metric in history), default=0)
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
        if id := os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return id
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "coterie"
        lock = None
        if self._store is not None:  # runs of a sweep start together and share the store
            self._store.mkdir(parents=True, exist_ok=True)
            lock = os.open(self._store / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            experiment = self._client.get_experiment_by_name(name)
            if experiment is not None:
                return str(experiment.experiment_id)
            return str(self._client.create_experiment(name))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            return str(self._client.get_experiment_by_name(name).experiment_id)
        finally:
            if lock is not None:
                os.close(lock)

    def event(self, event: Mapping[str, Any]) -> None:
        """Log the numbers of a round, with the round as the step, or the scores of newcomers."""
        if "event" not in event:
            self._log([event])
        elif event["event"] == "admission" and event.get("received"):
            logged = self._client.get_run(self._run).data.metrics
            scores = {
                f"newcomers/{name}": value
                for name, value in numbers({k: event[k] for k in ("received", "adapted")}).items()
            }
            if not logged.keys() & scores.keys():  # a resumed run admits them again
                self._send(_metrics(scores, event["round"]))

    def _log(self, events: Iterable[Mapping[str, Any]]) -> None:
        new = [e for e in events if e["round"] > self._logged]
        self._send([m for e in new for m in _metrics(numbers(e), e["round"])])
        if new:
            self._logged = new[-1]["round"]

    def _send(self, metrics: list[Metric]) -> None:
        for part in _parts(metrics, _METRICS):
            self._client.log_batch(self._run, metrics=part)

    def end(self, status: str, summary: Mapping[str, Any]) -> None:
        """Log the summary and how the run ended."""
        if summary:
            self._text("result.json", json.dumps(without_nan(summary), indent=1))
            table = None if self._directory is None else RunDir(self._directory).table
            if table is not None and table.is_file():
                self._client.log_artifact(self._run, str(table), _FILES)
        self._client.set_tag(self._run, "status", summary.get("stopped") or status)
        self._client.set_terminated(self._run, _STATUS[status])

    def _text(self, name: str, text: str) -> None:
        self._client.log_text(self._run, text, f"{_FILES}/{name}")


def _without_secrets(uri: str) -> str:
    """An address without a user name and password.

    >>> _without_secrets("https://me:secret@example.org:5000/x")
    'https://example.org:5000/x'
    """
    scheme, separator, rest = uri.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}" if separator else uri


def _metrics(values: Mapping[str, float], step: int) -> list[Metric]:
    now = int(time.time() * 1000)
    return [Metric(name, value, now, step) for name, value in values.items()]


def _parts(things: list[Any], most: int) -> Iterable[list[Any]]:
    return (things[start : start + most] for start in range(0, len(things), most))
