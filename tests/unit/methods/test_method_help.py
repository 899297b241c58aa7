"""Help for methods: docstrings are complete, tables follow signatures, pages are up to date."""

import importlib.util
import inspect
import io
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field
from rich.console import Console

from coterie.compose.assign import by_loss
from coterie.compose.grouped import grouped
from coterie.core.method import Count, Method, NonNegative, Share, method
from coterie.errors import ConfigError
from coterie.experiment.config import assign_texts, experiment_of, parse
from coterie.methods import METHODS, make
from coterie.report.listings import FAMILIES, method_listing
from coterie.report.method_help import (
    OTHER,
    SECTIONS,
    arguments,
    by_family,
    card,
    combination,
    explain,
    joined,
    markdown,
    overview,
    page,
    print_combination,
    print_explanation,
    required,
    sections,
    secure_words,
)

DOCS = Path(__file__).parents[3] / "docs"


@method
def made_up(
    k: Count,
    rate: NonNegative | Literal["auto"] = "auto",
    keep: Share | None = None,
    loud: bool = False,
    sizes: tuple[int, ...] = (1, 2),
    plain: int = 3,
    half: Annotated[float, Field(gt=0, le=0.5)] = 0.25,
    word: Literal["a", "b"] = "a",
) -> Method:
    """What [it] is | in a line.

    Rule: a*b < c, by ``rate`` and n_i,
    over two lines.

    A second paragraph.
    Args:
        k: how many, 1 or more; 1 is
            nothing: special.
        rate: strength.
        keep: what share, 0 to 1.
        loud: whether.
        sizes: of layers.
        plain: rounds, 2 or more.
        half: a half, above 0 to 0.5.
        word: "a" is this, "b" that.
    Server sees: means; then [each].
    Travels: 1 model down, 1 up. In a trial 2.
    Newcomers: none.
    Departs: nowhere.
    Notes: one.
    Reference: Nobody et al., Title, 2020.
    """
    return grouped("made-up", by_loss(k))


@method
def undocumented(k: int = 1) -> Method:
    """One line only."""
    return grouped("undocumented")


def shown(what, width=100):
    console = Console(file=io.StringIO(), width=width)
    what(console)
    return console.file.getvalue()


# --- every method of the registry ---------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_a_docstring_has_all_sections_in_order(name):
    found = sections(inspect.getdoc(METHODS[name]))
    takes = bool(inspect.signature(METHODS[name]).parameters)
    left_out = {"Notes"} - found.keys() | (set() if takes else {"Args"})
    assert list(found) == ["", "Family", *(s for s in SECTIONS if s not in left_out)]
    assert all(text.strip() for text in found.values())
    assert "\n" not in found[""].strip()  # the first line is one line
    for title in ("Server sees", "Travels", "Newcomers", "Departs", "Reference"):
        assert found[title].rstrip().endswith("."), title


def test_scaffolds_page_says_when_it_diverges_and_what_to_do():
    told = page(explain("scaffold", METHODS["scaffold"])).split("## Notes")[1]
    for words in ("two labels each", "above 0.01", "`train.lr = 0.01`", "`train.clip = 1`"):
        assert words in " ".join(told.split("## ")[0].split())


@pytest.mark.parametrize("name", METHODS)
def test_args_are_the_parameters_of_the_signature(name):
    told = arguments(sections(inspect.getdoc(METHODS[name])).get("Args", ""))
    assert list(told) == list(inspect.signature(METHODS[name]).parameters)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_has_a_family_and_its_numbers_have_ranges(name):
    it = explain(name, METHODS[name])
    assert it.family in FAMILIES[:-1]
    for parameter in it.parameters:
        assert parameter.meaning, parameter.name
        assert parameter.type != "any", parameter.name
        if re.search("integer|number", parameter.type):
            assert re.search(r"\d", parameter.range), parameter.name


@pytest.mark.parametrize("name", METHODS)
def test_a_default_is_shown_as_it_is(name):
    own = inspect.signature(METHODS[name]).parameters
    for parameter in explain(name, METHODS[name]).parameters:
        default = own[parameter.name].default
        if default is inspect.Parameter.empty:
            assert parameter.default is None
        elif isinstance(default, int | float) and not isinstance(default, bool):
            assert float(parameter.default) == default


# --- one that is made up ------------------------------------------------------------------------


def test_parameters_in_words():
    cells = [p.cells() for p in explain("made-up", made_up).parameters]
    assert cells == [
        ("k", "integer", "required", "1 or more", "how many; 1 is nothing: special."),
        ("rate", "number or choice", '"auto"', '0 or more, "auto"', "strength."),
        ("keep", "number", "none", "0 to 1", "what share."),
        ("loud", "true or false", "false", "–", "whether."),
        ("sizes", "list of integers", "[1, 2]", "–", "of layers."),
        ("plain", "integer", "3", "2 or more", "rounds."),
        ("half", "number", "0.25", "above 0 to 0.5", "a half."),
        ("word", "choice", '"a"', '"a", "b"', '"a" is this, "b" that.'),
    ]


def test_sections_in_words():
    it = explain("made-up", made_up)
    assert it.about == "What [it] is | in a line."
    rule = "a*b < c, by ``rate`` and n_i, over two lines.\n\nA second paragraph."
    assert it.sections["Rule"] == rule
    assert it.sections["Reference"] == "Nobody et al., Title, 2020."
    assert "Args" not in it.sections
    assert it.brings == ("who learns together",)
    assert it.example == "coterie run --method made-up --set method.k=4"
    assert it.signature.startswith('k, rate="auto", keep=none, loud=false')
    assert it.family == OTHER


@pytest.mark.parametrize("name", METHODS)
def test_the_example_of_every_method_is_one_that_it_takes(name):
    words = shlex.split(explain(name, METHODS[name]).example)[4:]
    tree = {"method": {"name": name}}
    if "--shift" in words:
        tree["shift"] = {"name": words[words.index("--shift") + 1]}
    assign_texts(tree, [words[i + 1] for i, word in enumerate(words) if word == "--set"])
    experiment_of(parse(tree))  # refuses what does not fit


def test_on_the_terminal():
    text = shown(lambda console: print_explanation(console, explain("made-up", made_up)))
    lines = [line.rstrip() for line in text.splitlines()]
    assert lines[:2] == ["made-up (other)", "What [it] is | in a line."]
    assert "  Means; then [each]." in lines  # neither markup nor lost
    assert "  a*b < c, by rate and n_i, over two lines." in lines
    row = next(line for line in lines if line.startswith("  rate "))
    assert re.split(r"  +", row.strip()) == [
        *("rate", "number or choice", '"auto"', '0 or more, "auto"', "strength.")
    ]
    titles = [line for line in lines if line and not line.startswith(" ")]
    assert titles[2:] == [*SECTIONS.values(), "Secure aggregation", "Combinations", "Try it"]
    assert "  Yes: it asks for sums only." in lines


def test_what_a_plugin_left_out_is_not_missed():
    text = shown(lambda console: print_explanation(console, explain("x", undocumented)))
    assert "One line only." in text
    assert "Rule" not in text
    assert "## Parameters" in page(explain("x", undocumented))


def test_a_combination_says_what_each_part_brings():
    parts = combination(
        {"made-up": made_up, "undocumented": undocumented, "fedper": METHODS["fedper"]}
    )
    assert [p.name for part in parts for p in part.parameters if p.name.endswith("k")] == [
        *("made-up.k", "undocumented.k", "fedper.k")
    ]
    assert "rate" in [p.name for p in parts[0].parameters]  # only one has it
    text = " ".join(shown(lambda console: print_combination(console, "a+b", parts)).split())
    assert "It brings who learns together." in text
    assert "It brings nothing that FedAvg has not." in text
    assert "It brings which layers are shared." in text


def test_markdown_shows_the_same_characters():
    text = page(explain("made-up", made_up))
    assert text.startswith("# made-up\n\nWhat \\[it\\] is | in a line.\n")
    assert "a\\*b \\< c, by `rate` and n_i, over two lines.\n\nA second paragraph." in text
    assert "Means; then \\[each\\]." in text
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == [
        *SECTIONS.values(),
        "Secure aggregation",
        "Combinations",
    ]
    assert markdown("_a_ n_i |x|", cell=True) == "\\_a\\_ n_i \\|x\\|"
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {6}
    assert len(rows) == 2 + 8


def test_a_card_has_the_line_and_the_parameters_only():
    text = card(explain("made-up", made_up))
    assert text.startswith("*What \\[it\\] is | in a line.*\n\n| parameter |")
    assert "Means" not in text


def in_rows(known):
    return {each.name: each.row for each in known}


def test_tables_by_family():
    known = [explain("made-up", made_up), *(explain(n, METHODS[n]) for n in ("ifca", "fedavg"))]
    assert list(by_family(known)) == ["global", "clustered", "other"]
    text = overview(known)
    assert re.findall("^### (.*)", text, re.MULTILINE) == ["Global", "Clustered", "Other"]
    assert (
        "| [`made-up`](made-up.md) | What \\[it\\] is \\| in a line | means; then \\[each\\] "
        "| yes | 1 model down, 1 up |" in text
    )
    table = shown(
        lambda console: console.print(method_listing(in_rows(known))),
        width=140,
    )
    assert table.index("fedavg") < table.index("ifca") < table.index("made-up")


# --- secure aggregation -------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_secure_sums_are_for_methods_that_do_not_look_at_each(name):
    factory = METHODS[name]
    made = factory(**dict.fromkeys(required(factory), 1))
    works, why = secure_words(made)
    assert works == (made.sees != "each")
    assert explain(name, factory).secure == (works, why)
    if not works:  # its own words, not the general ones
        told = joined(sections(inspect.getdoc(factory))["Server sees"])
        assert told.startswith(why.removeprefix("it looks at ").split(";")[0])


def test_the_reason_is_in_the_methods_own_words():
    assert secure_words(METHODS["cfl"]()) == (False, "it looks at each update, every round")
    assert secure_words(METHODS["local"]()) == (True, "it sends nothing that could be summed")
    works, why = secure_words(METHODS["fedclust"]())
    assert (works, why.split("; ")[1]) == (False, "``--reveal final-layer`` lets that through")
    silent = replace(grouped("silent"), sees="each")  # no docstring
    assert secure_words(silent) == (False, "it looks at the replies of each client")
    assert secure_words(make("cfl+ditto")) == secure_words(METHODS["cfl"]())  # by its one part
    assert secure_words(make("fedclust+ditto")) == (works, why)


def test_a_method_that_refuses_the_example_is_not_judged():
    @method
    def even(k: int) -> Method:
        """Even numbers only."""
        raise ConfigError("k is odd")

    it = explain("even", even)
    assert it.secure is None
    assert "Secure" not in page(it) + shown(lambda console: print_explanation(console, it))
    assert "| – |" in overview([it])


def test_the_listing_says_who_works_with_secure_sums():
    known = [explain(n, METHODS[n]) for n in ("fedavg", "krum", "fedfomo")]
    table = shown(
        lambda console: console.print(method_listing(in_rows(known))),
        width=140,
    )
    rows = dict(re.findall(r"^  (\S+) +(nothing|means|each) ", table, re.MULTILINE))
    assert rows == {"fedavg": "means", "krum": "each", "fedfomo": "each"}
    # Secure sums are for those who do not see each single reply, as the line below says.
    assert {it.name: it.secure[0] for it in known} == {n: s != "each" for n, s in rows.items()}
    assert "single replies (each; not with --secure) or means." in " ".join(table.split())


def test_a_combination_as_a_whole_works_with_secure_sums_or_not():
    parts = combination({name: METHODS[name] for name in ("cfl", "fedper")})
    whole = secure_words(make("cfl+fedper"))
    text = shown(lambda console: print_combination(console, "cfl+fedper", parts, whole))
    assert "Secure aggregation\n  No: it looks at" in text


# --- the pages ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pages():
    spec = importlib.util.spec_from_file_location("methods_pages", DOCS / "methods_pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_are_up_to_date(pages):
    found = [path.name for path in pages.outdated()]
    assert not found, f"run: make pages ({', '.join(found)})"


def test_every_method_has_its_page_and_the_front_page_links_to_it():
    front = (DOCS / "methods" / "README.md").read_text()
    for name in METHODS:
        assert (DOCS / "methods" / f"{name}.md").is_file()
        assert f"]({name}.md)" in front


def test_words_by_hand_stay_and_pages_without_a_method_go(pages, tmp_path):
    middle = f"{pages.BEGIN}\noutmoded\n{pages.END}"
    (tmp_path / "README.md").write_text(f"# Methods\n\nmine\n\n{middle}\n\nalso mine\n")
    (tmp_path / "ifca.md").write_text(f"# IFCA\n\n{middle}\n\n## By hand\n")
    (tmp_path / "gone.md").write_text(f"{pages.BEGIN}\n# gone\n{pages.END}\n")
    (tmp_path / "notes.md").write_text("no page of a method\n")
    found = pages.outdated(tmp_path)
    assert {p.stem for p in found} == {"README", "gone", *METHODS}
    front, hand = found[tmp_path / "README.md"], found[tmp_path / "ifca.md"]
    assert front.startswith("# Methods\n\nmine\n")
    assert front.endswith("\n\nalso mine\n")
    assert hand.startswith(f"# IFCA\n\n{pages.BEGIN}\n\n*Each client joins")
    assert hand.endswith("## By hand\n")
    assert "## Rule" not in hand
    assert "outmoded" not in hand + front
    assert found[tmp_path / "fedavg.md"].startswith(pages.BEGIN)
    assert "## Rule" in found[tmp_path / "fedavg.md"]
    assert found[tmp_path / "gone.md"] is None
    for path, text in found.items():
        path.unlink() if text is None else path.write_text(text)
    assert pages.outdated(tmp_path) == {}
