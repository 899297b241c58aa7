"""What is known about clients beside their samples: who is meant, and what is refused."""

import json

import numpy as np
import pytest

from coterie.data import RawData, build_population, from_clients
from coterie.data.metadata import by_client, names_file, read_groups, read_metadata
from coterie.errors import ConfigError, DataError

NAMES = {0: "rome", 1: "oslo", 2: "bern"}


def test_clients_are_named_by_id_or_by_name():
    wanted = {0: "s", 1: "n", 2: "s"}
    assert by_client({"0": "s", "1": "n", "2": "s"}, NAMES, "g") == wanted
    assert by_client({2: "s", 1: "n", 0: "s"}, NAMES, "g") == wanted
    assert by_client({"rome": "s", "oslo": "n", "2": "s"}, NAMES, "g") == wanted
    assert by_client(["s", "n", "s"], NAMES, "g") == wanted
    assert by_client([np.int64(7), 8, " x "], NAMES, "g") == {0: "7", 1: "8", 2: "x"}


def test_names_that_are_numbers():
    """Clients called 10, 2 and 3 may be named so, or by their ids 0, 1 and 2."""
    names = {0: "10", 1: "2", 2: "3"}
    assert by_client({"10": "a", "2": "b", "3": "c"}, names, "g") == {0: "a", 1: "b", 2: "c"}
    assert by_client({"0": "a", "1": "b", "2": "c"}, names, "g") == {0: "a", 1: "b", 2: "c"}
    # Where both would do, names count.
    assert by_client({"0": "a", "1": "b"}, {0: "1", 1: "0"}, "g") == {0: "b", 1: "a"}


def test_a_name_of_several_clients_means_none_of_them():
    same = {0: "x", 1: "x"}
    assert by_client({"0": "a", "1": "b"}, same, "g") == {0: "a", 1: "b"}
    with pytest.raises(ConfigError, match="'x' is not a known client"):
        by_client({"x": "a", "1": "b"}, same, "g")


def test_ids_may_have_gaps():
    assert by_client({"0": "a", "2": "b"}, {0: "", 2: ""}, "g") == {0: "a", 2: "b"}
    assert by_client(["a", "b"], {2: "", 0: ""}, "g") == {0: "a", 2: "b"}
    with pytest.raises(ConfigError, match="'1' is not a known client"):
        by_client({"0": "a", "1": "b", "2": "c"}, {0: "", 2: ""}, "g")


def test_all_that_is_wrong_with_clients_is_said_at_once():
    with pytest.raises(ConfigError) as told:
        by_client({"rome": "s", "0": "n", "paris": "s", "ulm": "s"}, NAMES, "groups.json")
    assert str(told.value) == (
        "groups.json: client 1 (oslo), client 2 (bern) are missing; 'paris', 'ulm' are not known "
        "clients; client 0 (rome) is named more than once. Name each of the 3 clients once, by "
        "its id or its name"
    )


@pytest.mark.parametrize("value", ["", "  ", None, 1.5, True, ["a"]])
def test_a_value_is_a_text_or_a_whole_number(value):
    with pytest.raises(ConfigError, match=r"g: the value .* of client 1 \(oslo\) must be"):
        by_client(["a", value, "b"], NAMES, "g")


def test_a_list_has_a_value_for_each_client():
    with pytest.raises(ConfigError, match="g: 2 values for 3 clients"):
        by_client(["a", "b"], NAMES, "g")


def test_files_and_columns_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file in ("a.json", "A.CSV", "a.tsv", "lists/site", "..\\site"):
        assert names_file(file)
    (tmp_path / "site").mkdir()
    assert not names_file("site")  # a folder of that name is no file
    (tmp_path / "plain").write_text("client,group\n0,a\n")
    assert names_file("plain")


# --- files ---------------------------------------------------------------------------------------

GROUPS = {"rome": "s", "1": "n"}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("g.json", json.dumps({"groups": GROUPS, "method": "fedclust", "rounds": 3})),
        ("g.json", json.dumps(GROUPS)),
        ("g.csv", "client,group\nrome,s\n1,n\n"),
        ("g.tsv", "group\tclient\nn \t1\ns\trome\n"),
        ("g", "\ufeffclient,group,note\nrome,s,x\n1,n,y\n"),
        ("g", json.dumps(GROUPS)),
    ],
)
def test_groups_in_a_file(name, content, tmp_path):
    (tmp_path / name).write_text(content)
    assert read_groups(tmp_path / name) == GROUPS


def test_whole_numbers_are_names_of_groups_too(tmp_path):
    (tmp_path / "g.json").write_text('{"0": 1, "1": 2}')
    assert read_groups(tmp_path / "g.json") == {"0": "1", "1": "2"}


@pytest.mark.parametrize(
    ("name", "content", "kind", "told"),
    [
        ("g.json", '{"groups": {"a": "x", "b": "y", "a": "z"}}', ConfigError, "'a' is named more"),
        ("g.json", '{"a": "x", "a": "x"}', ConfigError, "'a' is named more than once"),
        ("g.csv", "client,group\na,x\nb,y\na ,z\n", ConfigError, "'a' is named more than once"),
        ("g.json", '{"a": null}', ConfigError, "the value None of client 'a'"),
        ("g.csv", "client,group\na,\n", ConfigError, "line 2, column 'group': the value ''"),
        ("g.json", '{"a": ', DataError, "is not valid JSON"),
        ("g.json", '["x"]', DataError, "expected a JSON object"),
        ("g.csv", "name,group\na,x\n", DataError, "there is no column 'client'"),
        ("g.csv", "client,site\na,x\n", DataError, "there is no column 'group'"),
        ("g.csv", "client,group\na,x,y\n", DataError, "line 2: 3 fields"),
        ("g.csv", "client,group\n", DataError, "no rows"),
    ],
)
def test_what_is_wrong_with_a_file_of_groups(name, content, kind, told, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(kind, match=told) as raised:
        read_groups(tmp_path / name)
    assert str(tmp_path / name) in str(raised.value)


def test_a_key_that_is_twice_elsewhere_in_the_file_does_not_matter(tmp_path):
    (tmp_path / "g.json").write_text('{"groups": {"a": "x"}, "note": 1, "note": 2}')
    assert read_groups(tmp_path / "g.json") == {"a": "x"}


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="there is no file"):
        read_groups(tmp_path / "none.json")
    (tmp_path / "bytes.csv").write_bytes(b"client,group\n\xff,x\n")
    with pytest.raises(DataError, match="not UTF-8"):
        read_groups(tmp_path / "bytes.csv")


def test_metadata_in_a_file(tmp_path):
    wanted = {"site": {"0": "n", "1": "s"}, "device": {"0": "mri", "1": "ct"}}
    (tmp_path / "c.csv").write_text("client,site,device\n0,n,mri\n1,s,ct\n")
    (tmp_path / "c.json").write_text(json.dumps(wanted))
    assert read_metadata(tmp_path / "c.csv") == read_metadata(tmp_path / "c.json") == wanted
    (tmp_path / "c.json").write_text('{"site": {"0": "n"}, "site": {"0": "s"}}')
    with pytest.raises(ConfigError, match="two columns are named 'site'"):
        read_metadata(tmp_path / "c.json")
    (tmp_path / "c.json").write_text('{"site": "n"}')
    with pytest.raises(DataError, match="column 'site' must be an object"):
        read_metadata(tmp_path / "c.json")


# --- columns of the data -------------------------------------------------------------------------


def raw():
    """Six hospitals in three countries, four rows each."""
    hospital = np.repeat(np.array(["a", "b", "c", "d", "e", "f"]), 4)
    country = np.repeat(np.array(["x", "y", "x", "z", "y", "x"]), 4)
    columns = {"hospital": hospital, "country": country, "ward": np.tile([1, 2, 3, 4], 6)}
    return RawData(
        np.zeros((24, 2), np.float32), np.arange(24) % 2, "table", ("0", "1"), None, columns
    )


def built(**changes):
    given = {"clients": None, "partition": "column", "partition_params": {"by": "hospital"}}
    return build_population(raw(), **given, **changes)


def test_a_column_that_is_the_same_in_all_rows_of_a_client():
    assert built().metadata == {}
    assert built(metadata=["country"]).metadata == {
        "country": {0: "x", 1: "y", 2: "x", 3: "z", 4: "y", 5: "x"}
    }


def test_a_column_that_varies_or_is_not_there():
    with pytest.raises(DataError, match=r"column 'ward' varies within client 0 \(a\): '1' and '2'"):
        built(metadata=["country", "ward"])
    with pytest.raises(DataError, match=r"data.metadata: unknown column 'contry'; did you mean"):
        built(metadata=["contry"])


def test_metadata_of_clients_in_a_list():
    people = [(np.zeros((4, 2)), np.array([0, 1, 0, 1]))] * 2
    given = {"site": {1: "s", 0: "n"}, "device": ["ct", "mri"]}
    assert from_clients(people, metadata=given).metadata == {
        "site": {0: "n", 1: "s"},
        "device": {0: "ct", 1: "mri"},
    }
    with pytest.raises(ConfigError, match=r"metadata column 'site': client 1 is missing"):
        from_clients(people, metadata={"site": {0: "n"}})
    with pytest.raises(ConfigError, match=r"metadata column 'site': use a dict"):
        from_clients(people, metadata={"site": "n"})
    with pytest.raises(ConfigError, match=r"metadata must be a dict"):
        from_clients(people, metadata=["n", "s"])
