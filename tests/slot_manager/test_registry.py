"""adapters.yaml: what it may say, what is told of one that is broken (all of it, with lines), and the last good one."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from adapter_slots.errors import RegistryError, UnknownAdapter
from adapter_slots.pools import Pool
from adapter_slots.registry import FILE_NAME, Registry
from adapter_slots.registry_rules import problems_of
from adapter_slots.registry_schema import schema
from adapter_slots.registry_text import Document, TextError, dump
from trtllm_lora.signing import new_key

GOOD = "schema: 1\nadapters:\n  ant:\n    versions: [{version: 1, digest: d, path: x}]\n"
FULL = """\
schema: 1
base_model: meta/llama@abc
require_signatures: true
trusted_keys: [KEY]
pools:
  gold: {reserved: 2, cap: 4}
aliases:
  support:
    targets: {ant: 95, ant@1: 4.5, bee@7: 0.5}
adapters:
  ant:
    pool: gold
    pinned: true
    cold: fail
    tenants: [acme, globex]
    current: 2
    versions:
    - {version: 1, digest: d1, path: bundles/d1}
    - {version: 2, digest: d2, path: "s3://models/d2", base_model: meta/llama@abc, rank: 16,
       target_modules: [q_proj, v_proj], created: 2026-12-01T08:00:00Z, signature: "ed25519:k:s"}
    - {version: 3, digest: d3, path: bundles/d3}
  bee:
    versions:
    - {version: 7, digest: d7, path: /data/d7}
last_versions: {ant: 5}
"""
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """A file with everything in it."""
    file = tmp_path / FILE_NAME
    file.write_text(FULL.replace("KEY", new_key(tmp_path / "k").public.text))
    return file


def test_everything_a_file_may_say(full: Path) -> None:
    """Entries are current versions with the rules of their adapter; paths start at the file."""
    registry = Registry(full)
    ant, bee = registry.entries["ant"], registry.entries["bee"]
    assert (ant.version, ant.digest, ant.path, ant.is_remote) == (2, "d2", "s3://models/d2", True)
    assert (ant.pool, ant.pinned, ant.cold, ant.tenants) == ("gold", True, "fail", frozenset({"acme", "globex"}))
    assert (ant.base_model, ant.rank, ant.target_modules) == ("meta/llama@abc", 16, ("q_proj", "v_proj"))
    assert (ant.created, ant.signature) == ("2026-12-01T08:00:00+00:00", "ed25519:k:s")
    assert (bee.tenants, bee.pinned, bee.cold, bee.path) == (None, False, None, "/data/d7")
    assert registry.pools.by_name == {"gold": Pool(2, 4)}
    assert registry.terms.base_model == "meta/llama@abc"
    assert registry.terms.require_signatures
    assert len(registry.terms.keys) == 1
    assert registry.resolve("ant@3").path == str(full.parent / "bundles/d3")
    assert registry.resolve("support").ref == "ant@2"
    assert registry.resolve("support", draw=0.9999).ref == "bee@7"
    assert {registry.resolve("support", f"user-{i}").ref for i in range(200)} == {"ant@2", "ant@1", "bee@7"}


def test_a_file_of_the_first_form_is_what_it_was(tmp_path: Path) -> None:
    """`schema: 1` as it was written before: the last version is current; merge keys and names with @ still count."""
    file = tmp_path / FILE_NAME
    file.write_text(
        "schema: 1\npools: {g: {}}\nadapters:\n  bee@2: &a\n    pool: g\n    versions:\n"
        "    - {version: 1, digest: d1, path: p}\n    - {version: 5, digest: d5, path: p}\n"
        "  ant: {<<: *a, pool: null}\n"
    )
    registry = Registry(file)
    assert {name: (e.version, e.pool) for name, e in registry.entries.items()} == {"bee@2": (5, "g"), "ant": (5, None)}
    assert registry.resolve("bee@2").ref == "bee@2@5"


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (GOOD.replace("digest: d", "digest: 2001-99-99"), "month must be in"),
        (GOOD.replace("version: 1", "version: !!int x"), "invalid literal"),
        (GOOD.replace("version: 1", "version: " + "9" * 5000), "5000 digits"),
        (GOOD + "    pool: g\n", "line 5: adapters.ant.pool: there is no pool 'g'"),
        (GOOD + "    pool: [g]\n", "line 5: adapters.ant.pool: must be the name of a pool"),
        (GOOD + "    pool: {a: 1}\n", "must be the name of a pool"),
        ("schema: 1\nadapters: [", "not YAML"),
        ("schema: 2\nadapters: {}\n", "line 1: schema: 'schema: 1' expected"),
        ("", "'schema: 1' expected"),
        (GOOD + "  ant:\n    versions: [{version: 2, digest: e, path: x}]\n", "line 5: 'ant' is there twice"),
        (GOOD + "alias: {}\n", "line 5: alias: unknown key 'alias'; did you mean 'aliases'"),
        (GOOD + "    pined: true\n", "line 5: adapters.ant.pined: unknown key 'pined'; did you mean 'pinned'"),
        (GOOD.replace("path: x", "path: x, sha: y"), r"line 4: adapters.ant.versions\[0\].sha: unknown key 'sha'"),
        (GOOD.replace(", path: x", ""), r"versions\[0\]: must have version, digest, path"),
        (GOOD.replace("version: 1", "version: true"), "version: must be a whole number, found True"),
        (GOOD.replace("digest: d", "digest: 12"), "digest: must be text, found 12"),
        (GOOD + "    cold: maybe\n", "cold: must be one of wait, fail, base, found 'maybe'"),
        (GOOD + "    tenants: acme\n", "tenants: must be a list of names, found 'acme'"),
        (GOOD + "    pinned: 1\n", "pinned: must be true or false, found 1"),
        (GOOD + "    current: 3\n", "current: there is no version 3; there are 1"),
        (GOOD.replace("path: x}", "path: x}, {version: 1, digest: e, path: y}"), "version 1 is there twice"),
        (GOOD + "aliases: {ant: {targets: {ant: 100}}}\n", "'ant' is an adapter too"),
        (GOOD + "aliases: {ant@1: {targets: {ant: 100}}}\n", "'ant@1' reads as version 1 of the adapter 'ant'"),
        (GOOD + "aliases: {base: {targets: {ant: 100}}}\n", "'base' is no alias name"),
        (GOOD + "aliases: {a: {targets: {nat: 100}}}\n", "no adapter 'nat'; did you mean 'ant'"),
        (GOOD + "aliases: {a: {targets: {ant@2: 100}}}\n", "'ant' has no version 2; there are 1"),
        (GOOD + "aliases: {a: {targets: {ant: 90, ant@1: 5}}}\n", "weights sum to 95, not to 100"),
        (GOOD + "aliases: {a: {targets: {ant: 120}}}\n", "from 0 to 100, found 120"),
        (GOOD + "aliases: {a: {targets: {ant: .nan}}}\n", "from 0 to 100, found nan"),
        (GOOD + "aliases: {a: {targets: {}}}\n", "'targets' expected"),
        (GOOD + "aliases: {a: {ant: 100}}\n", "'targets' expected"),
        (GOOD + "aliases: [a]\n", "aliases: must be a mapping"),
        (GOOD + "pools: {g: {reserve: 1}}\n", "'reserved' and 'cap' are whole numbers"),
        (GOOD + "require_signatures: true\n", "name 'trusted_keys'"),
        (GOOD + "trusted_keys: [nokey.pub]\n", r"line 5: trusted_keys\[0\]: 'nokey.pub' is no public key"),
        (GOOD + "base_model: [x]\n", "base_model: must be text"),
        (GOOD + "? [a]\n: 1\n", "line 5: a key is a name or a number"),
        (GOOD + "x: !!python/object:os.system {}\n", "not YAML|is not read"),
        (GOOD + "x: &x [*x]\n", "unknown key 'x'"),
        (GOOD + "    pool: &x [*x]\n", r"must be the name of a pool, found \[\[...\]\]"),
        (GOOD + "<<: {alias: 1}\n", "unknown key 'alias'; did you mean 'aliases'"),
        (GOOD + "x: " + "[" * 900 + "]" * 900, "line 5: more than 32 lists within each other"),
        (GOOD + "---\nschema: 1\n", "line 5: one document is expected"),
        (GOOD + "a: &a {}\na: *a\n", "line 6: 'a' is there twice"),
    ],
)
def test_a_broken_registry_is_a_problem_told(tmp_path: Path, broken: str, words: str) -> None:
    """Whatever Python says of a value, `refresh` never raises, and the last good file stays in use."""
    file = tmp_path / FILE_NAME
    file.write_text(GOOD)
    registry = Registry(file)
    file.write_text(broken)
    assert not registry.refresh()
    assert re.search(words, registry.problem or ""), registry.problem
    assert set(registry.entries) == {"ant"}
    file.write_text(GOOD + "# mended\n")
    assert registry.refresh()
    assert registry.problem is None


def test_all_that_is_wrong_is_told_at_once_in_the_order_of_lines(tmp_path: Path) -> None:
    """A person mends a file once."""
    file = tmp_path / FILE_NAME
    file.write_text(
        "schema: 1\nadapters:\n  ant: {versions: []}\n  b!: {versions: [1]}\n  bee: {verions: []}\nmore: 1\n"
    )
    with pytest.raises(RegistryError) as refused:
        Registry(file)
    lines = re.findall(r"line (\d+)", str(refused.value))
    assert set(lines) == {"3", "4", "5", "6"}
    assert lines == sorted(lines)
    assert str(refused.value).startswith(f"{file}: line 3: adapters.ant.versions: must be a list")


def test_a_file_that_went_away_and_came_back_is_read_again(tmp_path: Path) -> None:
    """Even with the same time, size and number: the problem of its absence must not stay."""
    file = tmp_path / FILE_NAME
    file.write_text(GOOD)
    registry = Registry(file)
    file.rename(tmp_path / "aside")
    assert not registry.refresh()
    assert "No such file" in (registry.problem or "")
    (tmp_path / "aside").rename(file)
    registry.refresh()
    assert registry.problem is None


def test_a_version_is_never_changed_in_place(tmp_path: Path) -> None:
    """Other bytes under a number that was given are refused with both digests; another number is a new version."""
    file = tmp_path / FILE_NAME
    file.write_text(GOOD)
    registry = Registry(file)
    file.write_text(GOOD.replace("digest: d", "digest: e"))
    assert not registry.refresh()
    assert re.search("line 3: adapters.ant: version 1 had digest d and has e now", registry.problem or "")
    assert registry.entries["ant"].digest == "d"
    file.write_text(GOOD.replace("version: 1, digest: d", "version: 2, digest: e"))
    assert registry.refresh()
    assert registry.entries["ant"].digest == "e"
    file.write_text(GOOD.replace("digest: d", "digest: f"))
    assert not registry.refresh(), "version 1 was away, and comes back as something else"
    assert "version 1 had digest d and has f now" in (registry.problem or "")


@pytest.mark.parametrize("number", ["01", "+1", "1_0", "１"])
def test_a_version_is_named_in_one_way_only(full: Path, number: str) -> None:
    """`ant@1` is a version; what merely means the same number is a name nobody gave."""
    with pytest.raises(UnknownAdapter):
        Registry(full).resolve(f"ant@{number}")


NAMED = (
    "schema: 1\n{base}adapters:\n  {first}: &a\n    versions: [{{version: 2, digest: d, path: x}}]\n  {second}: *a\n"
)


@pytest.mark.parametrize(
    ("first", "second", "base", "words"),
    [
        ("ant", "ant@2", "", "'ant@2' reads as version 2 of the adapter 'ant'"),
        ("ant@2", "ant", "", "'ant@2' reads as version 2 of the adapter 'ant'"),
        ("ant", "ant@7", "", "'ant@7' reads as version 7 of the adapter 'ant'"),
        ("ant", "llama", "base_model: org/llama@r1\n", "'llama' reads as the base model 'org/llama'"),
        ("ant", "llama:bee", "base_model: org/llama\n", "'llama:bee' reads as the base model"),
        ("ant", "org/llama", "base_model: org/llama\n", "'org/llama' reads as the base model"),
    ],
)
def test_no_name_reads_as_another(tmp_path: Path, first: str, second: str, base: str, words: str) -> None:
    """Else one of the two would silently be answered by the other, perhaps by another tenant's."""
    file = tmp_path / FILE_NAME
    file.write_text(NAMED.format(first=first, second=second, base=base))
    with pytest.raises(RegistryError, match=re.escape(words)):
        Registry(file)


def test_a_registry_for_another_base_is_refused(tmp_path: Path) -> None:
    """The server's own base and the registry's must be one; a revision that is left out is not held against it."""
    file = tmp_path / FILE_NAME
    file.write_text(GOOD + "base_model: meta/llama@abc\n")
    with pytest.raises(RegistryError, match="it is for meta/llama@abc, this server has meta/llama@def"):
        Registry(file, base_model="meta/llama@def")
    assert Registry(file, base_model="meta/llama").terms.base_model == "meta/llama"
    assert Registry(file).terms.base_model == "meta/llama@abc"


def test_names_that_are_not_there_are_answered_with_near_ones(full: Path) -> None:
    """Adapters and aliases alike; of a version that is not there, those there are."""
    registry = Registry(full)
    with pytest.raises(UnknownAdapter, match="near names: support"):
        registry.resolve("suport")
    with pytest.raises(UnknownAdapter, match="adapter 'ant' has no version 9; there are 1, 2, 3"):
        registry.resolve("ant@9")
    with pytest.raises(UnknownAdapter, match="no adapter 'zebra@x'; there are: ant, bee, support"):
        registry.resolve("zebra@x")


def test_an_unknown_name_among_thousands_is_answered_in_bounded_work(tmp_path: Path) -> None:
    """Only neighbours in the alphabet are compared."""
    names = {
        f"adapter-{number:05}": {"versions": [{"version": 1, "digest": "d", "path": "p"}]} for number in range(3000)
    }
    (tmp_path / FILE_NAME).write_text(dump({"schema": 1, "adapters": names}))
    registry = Registry(tmp_path / FILE_NAME)
    with pytest.raises(UnknownAdapter, match="near names: adapter-02000"):
        registry.resolve("adapter-02000x")
    assert len(registry.content._neighbours("adapter-02000x")) == 200


# --- the published schema


def test_the_published_schema_is_current() -> None:
    """docs/adapters.schema.json is what the program says (`lora-slots adapters schema`)."""
    assert json.loads((DOCS / "adapters.schema.json").read_text()) == schema()


def test_the_documented_file_is_one(tmp_path: Path) -> None:
    """docs/registry.md shows a registry that a server takes."""
    text = re.search(r"```yaml\n(.*?)```", (DOCS / "registry.md").read_text(encoding="utf-8"), re.DOTALL)
    assert text is not None
    new_key(tmp_path / "release.key")
    (tmp_path / FILE_NAME).write_text(text[1], encoding="utf-8")
    registry = Registry(tmp_path / FILE_NAME)
    assert (registry.resolve("support-bot").version, registry.resolve("support-bot@2").is_remote) == (1, True)
    jsonschema_rs.validate(dict(schema()), as_json(Document(text[1]).data))


def test_the_full_file_is_of_the_schema(full: Path) -> None:
    """The file with everything in it; YAML's time is JSON's text."""
    jsonschema_rs.validate(dict(schema()), as_json(Document(full.read_text()).data))


def as_json(data: Any) -> Any:
    """As a program that reads the file as JSON sees it."""
    return json.loads(json.dumps(data, default=str))


WHOLE: dict[str, Any] = as_json(Document(FULL).data)
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    -1,
    0,
    1,
    2,
    0.5,
    100,
    101,
    "",
    "x",
    "ant",
    "a!",
    [],
    ["x"],
    [""],
    [3],
    {},
)
BEYOND = (
    "there twice", "there is no version", "there is no adapter", "has no version", "sum to", "there is no pool",
    "name 'trusted_keys'", "is an adapter too", "reads as version", "reads as the base model",
)  # fmt: skip
"""What a schema cannot say."""


def places(data: Any, where: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where every value of a document is."""
    inside = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [where, *(place for key, value in inside for place in places(value, (*where, key)))]


NAMES = ("base", "x..y", "new", "é", "a" * 129, "n@3", "")


def holder(place: tuple[Any, ...]) -> tuple[Any, Any]:
    """A fresh copy of the full file, and in it what holds a value."""
    document = copy.deepcopy(WHOLE)
    parent = document
    for step in place[:-1]:
        parent = parent[step]
    return document, parent


def variants() -> Iterator[Any]:
    """The full file with one thing in it changed: another value, no value, another name, one more."""
    for place in filter(None, places(WHOLE)):
        key = place[-1]
        document, parent = holder(place)
        del parent[key]
        yield document
        for value in VALUES:
            document, parent = holder(place)
            parent[key] = copy.deepcopy(value)
            yield document
        for name in NAMES if isinstance(key, str) else ():
            document, parent = holder(place)
            parent[name] = parent.pop(key)
            yield document
            document, parent = holder(place)
            parent[name] = 1
            yield document


def test_rules_and_schema_agree() -> None:
    """The schema takes a document exactly if the rules find nothing but what a schema cannot say."""
    validator = jsonschema_rs.validator_for(dict(schema()))
    taken = []
    for document in variants():
        found = [problem.what for problem in problems_of(document)]
        shape = [what for what in found if not any(words in what for words in BEYOND)]
        taken.append(validator.is_valid(document))
        assert taken[-1] == (not shape), (document, found)
    assert 100 < sum(taken) < len(taken) - 500, "both kinds are among them"


@given(st.text(max_size=200) | st.binary(max_size=200).map(lambda raw: raw.decode("latin-1")))
@settings(max_examples=300, deadline=None)
def test_no_text_breaks_the_reader(text: str) -> None:
    """Property: any text is data, or a TextError of one line."""
    try:
        problems = list(problems_of(Document(text).data))
    except TextError as error:
        assert "\n" not in str(error)
    else:
        assert problems


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=12,
    )
)
@settings(max_examples=200, deadline=None)
def test_the_quick_reader_reads_what_pyyaml_reads(data: Any) -> None:
    """Property: our constructor gives what PyYAML's gives."""
    text = yaml.safe_dump(data)
    assert Document(text).data == yaml.safe_load(text)
