"""A key is declared in one line; flags, help, documentation and settings come from that line."""

import json
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from inspect import get_annotations
from pathlib import Path

import pytest

import coterie
from coterie.channel.compression.coding import Coding
from coterie.channel.privacy.settings import Privacy
from coterie.core.keys import flags, keys
from coterie.core.schema import (
    Config,
    Policy,
    PrivacySection,
    Schedule,
    StopSection,
    WireSection,
    part,
)
from coterie.errors import ConfigError
from coterie.experiment.config import parse, settings_of
from coterie.experiment.experiment import Settings
from coterie.experiment.stopping import Stop

ROOT = Path(__file__).parents[3]
PLACE = '    seed: int = key(0, "Random seed of the run.", flag="--seed")\n'
LINE = '    novelty: int = key(3, "How new it is. More is newer.", flag="--novelty", ge=1, le=9)\n'
LOOK = """
import json, sys
sys.path.insert(0, DOCS)
from typer.testing import CliRunner
from reference_pages import config_page
from coterie.cli.app import app
from coterie.errors import ConfigError
from coterie.cli.options import resolve
from coterie.experiment.config import parse, settings_of

def refused(tree):
    try:
        parse(tree)
    except ConfigError as error:
        return str(error)

print(json.dumps({
    "help": {c: CliRunner().invoke(app, [c, "--help"]).output for c in ("run", "compare")},
    "page": config_page(open(PAGE).read()),
    "set": settings_of(parse(resolve(None, ["run.novelty=5"]))).novelty,
    "flag": settings_of(parse(resolve(None, None, novelty=7))).novelty,
    "kept": parse({}).model_dump()["run"]["novelty"],
    "bound": refused({"run": {"novelty": 10}}),
    "misspelt": refused({"run": {"noveltie": 5}}),
}))
"""


def test_a_new_key_is_one_line(tmp_path):
    package = tmp_path / "coterie"
    shutil.copytree(Path(coterie.__file__).parent, package)
    schema = package / "core/schema.py"
    text = schema.read_text()
    assert text.count(PLACE) == 1
    schema.write_text(text.replace(PLACE, PLACE + LINE))
    docs = ROOT / "docs"
    script = LOOK.replace("DOCS", repr(str(docs)))
    script = script.replace("PAGE", repr(str(docs / "reference" / "config.md")))
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(tmp_path), "COLUMNS": "200", "PATH": "", "HOME": str(tmp_path)},
    )
    result = json.loads(done.stdout)
    for shown in result["help"].values():
        assert "--novelty" in shown
        assert "How new it is (default: 3)." in shown
    row = "| `novelty` (`--novelty`) | whole number from 1, to 9 | `3` | How new it is. More is "
    assert row in result["page"]
    assert (result["set"], result["flag"], result["kept"]) == (5, 7, 3)
    assert result["bound"] == "run.novelty = 10: must be at most 9"
    assert "did you mean 'run.novelty'" in result["misspelt"]


def test_every_key_says_what_it_means_in_a_sentence():
    for key in keys():
        assert key.meaning.endswith("."), key.path
        assert key.help.endswith("."), key.path
        assert all((key.values, key.default)), key.path
        assert "](" not in key.help, key.path
    assert len(flags()) == len([key for key in keys() if key.flag])  # no two have the same flag


@pytest.mark.parametrize(
    ("table", "value"),
    [(PrivacySection, Privacy), (StopSection, Stop), (WireSection, Coding), (Policy, Settings)],
)
def test_what_runs_work_with_is_the_declared_table(table, value):
    assert issubclass(value, table)
    declared = {field.name for field in fields(table)}
    assert not declared & set(get_annotations(value))  # nothing is declared anew


def test_settings_are_those_of_an_empty_configuration():
    assert settings_of(parse({})) == Settings()
    assert part(Schedule, Config().train) == Schedule()


def test_a_table_made_in_python_is_checked_and_says_so_in_a_sentence():
    with pytest.raises(ConfigError, match=r"^train\.lr = -1: must be greater than 0$"):
        Schedule(lr=-1)
    with pytest.raises(ConfigError, match=r"privacy\.min_group = 1: must be at least 2"):
        replace(Privacy(), min_group=1)
    with pytest.raises(ConfigError, match=r"unknown key 'train\.lrs'; did you mean 'train\.lr'"):
        Schedule(lrs=1)
    with pytest.raises(ConfigError, match=r"run\.sampling 'fixd'; did you mean 'fixed'"):
        parse({"run": {"sampling": "fixd"}})


def test_declarations_need_neither_torch_nor_numpy():
    source = ROOT / "src" / "coterie"
    look = (
        "import sys, types; package = types.ModuleType('coterie'); "
        f"package.__path__ = [{str(source)!r}]; sys.modules['coterie'] = package; "
        "import coterie.core.keys, coterie.cli.options; "
        "print([m for m in ('torch', 'numpy', 'scipy', 'safetensors') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
