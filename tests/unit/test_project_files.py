"""The files that a hosting service, PyPI and citation tools read: they parse, and they agree."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import coterie

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: pip install 'coterie[docs]'")

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
YAML = sorted([*GITHUB.rglob("*.yml"), ROOT / "CITATION.cff"])
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted(
    set((GITHUB / "ISSUE_TEMPLATE").glob("*.yml")) - {GITHUB / "ISSUE_TEMPLATE/config.yml"}
)


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def steps(path: Path) -> list[dict[str, Any]]:
    """The steps of a workflow or of an action, of all jobs."""
    content = read(path)
    jobs = content["jobs"].values() if "jobs" in content else [content["runs"]]
    return [step for job in jobs for step in job["steps"]]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", YAML, ids=name)
def test_it_is_yaml(path):
    assert isinstance(read(path), dict)


def test_the_tests_run_on_the_versions_of_python_that_the_package_names():
    matrix = read(GITHUB / "workflows/ci.yml")["jobs"]["tests"]["strategy"]["matrix"]
    prefix = "Programming Language :: Python :: "
    named = [c.removeprefix(prefix) for c in PROJECT["classifiers"] if c.startswith(prefix)]
    assert matrix["python-version"] == named
    assert PROJECT["requires-python"] == f">={named[0]}"
    page = (ROOT / "docs/compatibility.md").read_text()
    assert all(version in page for version in named)


@pytest.mark.parametrize("path", WORKFLOWS, ids=name)
def test_its_commands_are_targets_of_the_makefile(path):
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony
    actions = sorted((GITHUB / "actions").rglob("action.yml"))
    commands = " && ".join(step.get("run", "") for p in [path, *actions] for step in steps(p))
    targets = set(re.findall(r"\bmake (\S+)", commands))
    assert {"setup", "test", "build"} <= targets
    assert targets <= set(phony[1].split())


@pytest.mark.parametrize("path", WORKFLOWS, ids=name)
def test_its_actions_exist_or_are_pinned_to_a_major_version(path):
    for step in steps(path):
        used = step.get("uses", "")
        if used.startswith("./"):
            assert (ROOT / used / "action.yml").exists()
        elif used:
            assert re.search(r"@(v\d+|release/v\d+)$", used), used


def test_only_what_publishes_may_identify_itself_to_others():
    release = read(GITHUB / "workflows/release.yml")
    assert release["permissions"] == {"contents": "read"}
    asking = [job for job in release["jobs"].values() if "id-token" in job.get("permissions", {})]
    assert asking == [release["jobs"]["publish"]]
    assert release[True]["push"]["tags"] == ["v*"]  # YAML 1.1 reads the key "on" as true


@pytest.mark.parametrize("path", FORMS, ids=name)
def test_an_issue_form_has_questions_with_labels(path):
    form = read(path)
    assert form["name"]
    assert form["description"]
    assert len({part["id"] for part in form["body"]}) == len(form["body"])
    for part in form["body"]:
        assert part["type"] in {"textarea", "input", "dropdown"}
        assert part["attributes"]["label"]


def test_the_citation_is_of_this_version():
    citation = read(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= set(citation)  # required by the format
    assert citation["version"] == coterie.__version__
    assert citation["license"] == PROJECT["license"]
    assert [author["name"] for author in citation["authors"]] == [
        author["name"] for author in PROJECT["authors"]
    ]


def test_all_files_name_the_same_home():
    home = PROJECT["urls"]["Homepage"]
    assert all(url.startswith(home) for url in PROJECT["urls"].values())
    assert read(ROOT / "CITATION.cff")["repository-code"] == home
    for path in (ROOT / "SECURITY.md", GITHUB / "ISSUE_TEMPLATE/config.yml"):
        assert f"{home}/security/advisories/new" in path.read_text()
