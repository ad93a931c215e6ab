"""Writing adapters.yaml: many processes lose nothing, whoever is killed breaks nothing, all of it is recorded."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from fakes.bundles import small_bundle

from adapter_slots.errors import ChangeRefused, RegistryError
from adapter_slots.registry import FILE_NAME, Registry, publish, publish_at
from adapter_slots.registry_changes import (
    add_version,
    give_share,
    make_current,
    remove,
    remove_alias,
    set_alias,
    set_rules,
    set_signature,
)
from adapter_slots.registry_history import Record, read_history, undo
from adapter_slots.registry_home import FileHome
from adapter_slots.registry_rules import problems_of
from adapter_slots.registry_writing import Changed, change

PUBLISH = """
import sys
from pathlib import Path
from adapter_slots.registry import publish_at
file, who, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
for number in range(count):
    publish_at(file, f"own-{who}-{number}", f"{who}{number}", "p")
    publish_at(file, "shared", f"{who}-{number}", "p")
"""
FOREVER = """
import itertools, sys
from pathlib import Path
from adapter_slots.registry import publish_at
for number in itertools.count():
    publish_at(Path(sys.argv[1]), "ant", f"{sys.argv[2]}-{number}", "p")
"""
PROCESSES, EACH = 6, 8


def started(script: str, *arguments: object) -> subprocess.Popen[bytes]:
    """A Python of its own."""
    return subprocess.Popen([sys.executable, "-c", script, *map(str, arguments)])


def make(home: FileHome, what: str, edit: Callable[[dict[str, Any]], dict[str, Any]]) -> Changed:
    """A change."""
    return change(home, what, edit)


def added(name: str, digest: str, **how: bool) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The edit that adds a version."""
    return lambda doc: add_version(doc, name, {"digest": digest, "path": "p"}, **how)[0]


@pytest.fixture
def home(tmp_path: Path) -> FileHome:
    """ant with two versions, the first one current, and an alias over both."""
    home = FileHome(tmp_path / FILE_NAME)
    make(home, "add ant", added("ant", "d1"))
    make(home, "add ant again", added("ant", "d2", makes_current=False))
    make(home, "alias", lambda doc: set_alias(doc, "support", {"ant": 95, "ant@2": 5}))
    return home


def test_no_update_of_many_processes_is_lost(tmp_path: Path) -> None:
    """Six processes publish at once, each adapters of its own and versions of one they share; a reader looks on."""
    file = tmp_path / FILE_NAME
    publish_at(file, "shared", "first", "p")
    registry = Registry(file)
    processes = [started(PUBLISH, file, who, EACH) for who in range(PROCESSES)]
    seen = set()
    while any(process.poll() is None for process in processes):
        registry.refresh()
        assert registry.problem is None, "a reader never sees half a file"
        seen.add(len(registry.entries))
    assert [process.wait() for process in processes] == [0] * PROCESSES
    registry.refresh()
    versions = registry.content.versions
    assert len(seen) > 3, "it did look on"
    assert {name for name in versions if name != "shared"} == {
        f"own-{who}-{number}" for who in range(PROCESSES) for number in range(EACH)
    }
    assert sorted(versions["shared"]) == list(range(1, PROCESSES * EACH + 2)), "every number was given once"
    assert {e.digest for e in versions["shared"].values()} == {
        "first", *(f"{who}-{number}" for who in range(PROCESSES) for number in range(EACH))
    }  # fmt: skip
    records = read_history(FileHome(file).notes())
    assert len(records) == 2 * PROCESSES * EACH + 1
    assert all(record.follows for record in records), "each change began where the one before it ended"
    assert hashlib.sha256(file.read_bytes()).hexdigest().startswith(records[-1].after)


def test_a_writer_that_is_killed_breaks_nothing(tmp_path: Path) -> None:
    """SIGKILL in the middle of it, again and again: the file is whole, the lock is free, nothing is left beside it."""
    file = tmp_path / FILE_NAME
    for round_ in range(6):
        process = started(FOREVER, file, round_)
        before = len(read_history(FileHome(file).notes()))
        while len(read_history(FileHome(file).notes())) < before + 3:
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
        Registry(file)
        publish_at(file, "bee", f"after-{round_}", "p")
    assert len(Registry(file).content.versions["bee"]) == 6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapters.history.jsonl", FILE_NAME]


def test_publishing_what_is_current_changes_nothing(tmp_path: Path) -> None:
    """Not the file, not the history; other content is a new version, even if an older one had it."""
    file = tmp_path / FILE_NAME
    ant, bee = small_bundle(tmp_path / "b", "ant"), small_bundle(tmp_path / "b", "bee", seed=1)
    assert publish(file, ant).version == 1
    stamp = file.stat().st_mtime_ns
    assert publish(file, ant).version == 1
    assert file.stat().st_mtime_ns == stamp
    assert [publish(file, bundle, "ant").version for bundle in (bee, ant)] == [2, 3]
    assert len(read_history(FileHome(file).notes())) == 3
    assert Registry(file).entries["ant"].path == str(ant.path.parent.parent / "b" / ant.digest)
    with pytest.raises(RegistryError, match="is no adapter name"):
        publish(file, ant, "base")


def test_publishing_ends_what_held_an_older_version_current(home: FileHome) -> None:
    """`publish` makes current, whatever `current` said."""
    publish_at(home.file, "ant", "d9", "p")
    assert Registry(home.file).entries["ant"].digest == "d9"


def test_the_history_says_who_when_what_from_what_to_what(home: FileHome) -> None:
    """One line for each change, and a gap where somebody edited by hand."""
    home.file.write_text(home.file.read_text().replace("ant@2: 5", "ant@2: 10").replace("ant: 95", "ant: 90"))
    make(home, "mine", lambda doc: set_rules(doc, "ant", {"cold": "fail"}))
    records = read_history(home.notes())
    assert [record.what for record in records] == ["add ant", "add ant again", "alias", "mine"]
    assert [record.follows for record in records] == [True, True, True, False]
    assert records[3].changes[0].after == {**records[3].changes[0].before, "cold": "fail"}
    assert all("@" in record.by and record.at.endswith("Z") for record in records)
    assert len({record.id for record in records}) == 4


def test_half_a_line_of_history_costs_only_itself(home: FileHome) -> None:
    """What a killed writer began is passed over, and does not swallow the next line."""
    with home.history.open("a") as out:
        out.write('{"id": "half')
    make(home, "next", lambda doc: set_rules(doc, "ant", {"pinned": True}))
    assert [record.what for record in read_history(home.notes())] == ["add ant", "add ant again", "alias", "next"]


def test_a_change_that_would_break_the_registry_is_refused_whole(home: FileHome) -> None:
    """The rules are asked before anything is written; everything that is wrong is told."""
    before = home.file.read_bytes(), home.history.read_bytes()
    with pytest.raises(ChangeRefused, match=r"no version 9.*sum to 50") as refused:
        make(home, "bad", lambda doc: set_alias(doc, "support", {"ant@9": 50}))
    assert refused.value.grpc_code == "FAILED_PRECONDITION"
    assert (home.file.read_bytes(), home.history.read_bytes()) == before


def test_a_broken_file_is_not_written_over(home: FileHome) -> None:
    """A typo of a person is told, not replaced."""
    home.file.write_text("schema: 1\nadapters: [")
    with pytest.raises(RegistryError, match="not YAML"):
        publish_at(home.file, "ant", "d", "p")
    assert home.file.read_text() == "schema: 1\nadapters: ["


def test_comments_that_are_lost_are_told(home: FileHome) -> None:
    """YAML's comments do not survive; ours at the top is no loss."""
    assert not make(home, "one", lambda doc: set_rules(doc, "ant", {"cold": "fail"})).warnings
    home.file.write_text("# why\n" + home.file.read_text())
    assert "comments" in make(home, "two", lambda doc: set_rules(doc, "ant", {"cold": "wait"})).warnings[0]


def test_an_edit_by_hand_meanwhile_is_not_overwritten(home: FileHome) -> None:
    """An editor asks for no lock: the change is made anew, on what is there then."""
    tries = []

    def edit(doc: dict[str, Any]) -> dict[str, Any]:
        tries.append(1)
        if len(tries) == 1:
            home.file.write_text(home.file.read_text() + "base_model: by/hand\n")
        return set_rules(doc, "ant", {"cold": "fail"})

    make(home, "mine", edit)
    document = doc_of(home)
    assert (document["base_model"], document["adapters"]["ant"]["cold"], len(tries)) == ("by/hand", "fail", 2)


def test_mode_and_link_of_the_file_stay(tmp_path: Path) -> None:
    """A registry that only a group may read stays so; a link still leads to the real file."""
    real = tmp_path / "real"
    real.mkdir()
    publish_at(real / "r.yaml", "ant", "d", "p")
    (real / "r.yaml").chmod(0o640)
    (tmp_path / FILE_NAME).symlink_to(real / "r.yaml")
    publish_at(tmp_path / FILE_NAME, "bee", "d", "p")
    assert (tmp_path / FILE_NAME).is_symlink()
    assert (real / "r.yaml").stat().st_mode & 0o777 == 0o640
    assert set(Registry(tmp_path / FILE_NAME).entries) == {"ant", "bee"}


def test_writers_by_different_links_share_one_lock_and_one_history(tmp_path: Path) -> None:
    """The lock belongs to the file, not to the name it was found by."""
    real = FileHome(tmp_path / "real.yaml")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "link.yaml").symlink_to(tmp_path / "real.yaml")
    link = FileHome(tmp_path / "other" / "link.yaml")
    publish_at(tmp_path / "real.yaml", "ant", "d", "p")
    publish_at(tmp_path / "other" / "link.yaml", "bee", "d", "p")
    assert link.history == real.history
    assert [record.what for record in read_history(link.notes())] == ["publish ant", "publish bee"]
    assert read_history(link.notes())[1].follows
    with real.locked(), open(link.history, "rb") as other, pytest.raises(BlockingIOError):  # noqa: PTH123
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_place_that_cannot_be_written_is_told(home: FileHome) -> None:
    """Which file, and why."""
    home.file.parent.chmod(0o500)
    with pytest.raises(RegistryError, match=r"adapters\.yaml: cannot be written: Permission denied"):
        publish_at(home.file, "bee", "d", "p")
    home.file.parent.chmod(0o700)


def test_a_place_that_is_none_is_told(tmp_path: Path) -> None:
    """A folder where a file should be, a file where a folder should be."""
    (tmp_path / FILE_NAME).mkdir()
    with pytest.raises(RegistryError, match="Is a directory"):
        publish_at(tmp_path / FILE_NAME, "bee", "d", "p")
    (tmp_path / "file").write_text("")
    with pytest.raises(RegistryError, match="cannot be locked"):
        publish_at(tmp_path / "file" / FILE_NAME, "bee", "d", "p")


# --- the changes themselves


def doc_of(home: FileHome) -> dict[str, Any]:
    """The document, which is a good one."""
    document = dict(yaml.safe_load(home.file.read_text(encoding="utf-8")))
    assert not list(problems_of(document))
    return document


def test_versions_come_and_go(home: FileHome) -> None:
    """The last is current unless another is said; a number is never given twice, not even after a removal."""
    doc = doc_of(home)
    assert doc["adapters"]["ant"]["current"] == 1
    assert "current" not in make_current(doc, "ant", 2)["adapters"]["ant"]
    doc, number = add_version(remove(remove_alias(doc, "support"), "ant", 2), "ant", {"digest": "d3", "path": "p"})
    assert number == 3
    doc = remove(doc, "ant")
    assert doc["adapters"] == {}
    doc, number = add_version(doc, "ant", {"digest": "d4", "path": "p"})
    assert number == 4
    assert doc["last_versions"] == {"ant": 3}


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda d: remove(d, "ant"), r"ant is a target of alias support \(ant, 95 %\), support \(ant@2, 5 %\)"),
        (lambda d: remove(d, "ant", 2), r"ant@2 is a target of alias support \(ant@2, 5 %\)"),
        (lambda d: remove(d, "ant", 1), "ant@1 is the current version: promote another one first"),
        (lambda d: remove(d, "ant", 7), "no version 7; there are 1, 2"),
        (lambda d: remove(d, "nat"), "no adapter 'nat'; near names: ant"),
        (lambda d: remove(d, "support"), "'support' is an alias; an adapter is expected"),
        (lambda d: make_current(d, "ant", 3), "no version 3"),
        (lambda d: set_signature(d, "ant", 3, "s"), "no version 3"),
        (lambda d: remove_alias(d, "suport"), "no alias 'suport'; near names: support"),
        (lambda d: add_version(d, "support", {}), "'support' is an alias"),
        (lambda d: add_version(d, "ant@2", {}), "'ant@2' reads as version 2"),
        (lambda d: add_version(d, "base", {}), "no adapter name"),
        (lambda d: give_share(d, "support", "ant@2", 101.0), "0 to 100 percent"),
        (lambda d: give_share(d, "other", "ant@2", 5.0), "no alias 'other'"),
        (lambda d: give_share(d, "support", "bee@1", None), "bee@1 is no target yet"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_reason(
    home: FileHome, edit: Callable[[dict[str, Any]], Any], words: str
) -> None:
    """And the document is as it was."""
    doc = doc_of(home)
    with pytest.raises(ChangeRefused, match=words):
        edit(doc)
    assert doc == doc_of(home)


@pytest.mark.parametrize(
    ("targets", "target", "percent", "then"),
    [
        ({"ant": 95, "ant@2": 5}, "ant@2", 20.0, {"ant": 80, "ant@2": 20}),
        ({"ant": 80, "ant@2": 20}, "ant@2", None, {"ant@2": 100}),
        ({"ant@2": 100}, "ant@2", None, {"ant@2": 100}),
        ({"ant": 100}, "ant@2", 0.0, {"ant": 100, "ant@2": 0}),
        ({"ant": 50, "bee": 50}, "ant@2", 5.0, {"ant": 45, "ant@2": 5, "bee": 50}),
        ({"ant": 45, "ant@2": 5, "bee": 50}, "ant@2", None, {"ant@2": 50, "bee": 50}),
        ({"ant": 60, "bee": 40}, "cat@1", 10.0, {"ant": 54, "bee": 36, "cat@1": 10}),
        ({"ant": 95, "cat@1": 5}, "cat@1", 30.0, {"ant": 70, "cat@1": 30}),
        ({"ant": 33.3, "ant@1": 33.3, "ant@2": 33.4}, "ant@3", 10.0, None),
    ],
)
def test_shares(targets: dict[str, float], target: str, percent: float | None, then: dict[str, float] | None) -> None:
    """Promotion takes from the adapter's own versions, else from all; what comes to nothing goes."""
    doc = give_share(set_alias({"schema": 1, "adapters": {}}, "a", targets), "a", target, percent)
    found = doc["aliases"]["a"]["targets"]
    assert sum(found.values()) == pytest.approx(100, abs=1e-6)
    assert then is None or found == then


def test_a_share_of_others_has_to_be_said(home: FileHome) -> None:
    """All of an adapter that has no other version there would be all of the alias: that is not guessed."""
    doc = set_alias(doc_of(home), "support", {"ant": 95, "bee@1": 5})
    with pytest.raises(
        ChangeRefused, match="bee@1 is the only version of bee in alias 'support': say how many percent"
    ):
        give_share(doc, "support", "bee@1", None)
    doc = set_alias(doc, "support", {"ant": 30, "ant@2": 20, "bee": 50})
    with pytest.raises(ChangeRefused, match="ant has 50 % of alias 'support' in all, 60 % is more"):
        give_share(doc, "support", "ant@2", 60.0)


# --- undoing


def rolled_back(home: FileHome, name: str | None = None) -> Record:
    """Undo, as the command does."""
    taken: list[Record] = []

    def edit(doc: dict[str, Any]) -> dict[str, Any]:
        new, record = undo(doc, read_history(home.notes()), name)
        taken[:] = [record]
        return new

    change(home, "rollback", edit, undoes=lambda: taken[0].id)
    return taken[0]


def test_rollback_goes_back_one_change_at_a_time(home: FileHome) -> None:
    """Each call undoes one more; changes of other names in between are left alone."""
    shares: list[dict[str, float]] = [{"ant": 80, "ant@2": 20}, {"ant@2": 100}]
    for targets in shares:
        make(home, f"promote {targets}", partial(set_alias, name="support", targets=targets))
    make(home, "add bee", added("bee", "b"))
    states = [{"ant": 80, "ant@2": 20}, {"ant": 95, "ant@2": 5}, None]
    for state in states:
        rolled_back(home, "support")
        assert doc_of(home).get("aliases", {}).get("support", {}).get("targets") == state
    assert "bee" in doc_of(home)["adapters"]
    with pytest.raises(ChangeRefused, match="no change of 'support' that could be undone"):
        rolled_back(home, "support")


def test_a_rolled_back_version_keeps_its_number(home: FileHome) -> None:
    """Undoing an addition takes the version away, and its number is not given again."""
    make(home, "add", added("ant", "d3"))
    rolled_back(home, "ant")
    assert [v["version"] for v in doc_of(home)["adapters"]["ant"]["versions"]] == [1, 2]
    make(home, "add", added("ant", "other"))
    assert doc_of(home)["adapters"]["ant"]["versions"][-1]["version"] == 4


def test_a_change_of_two_things_is_undone_whole(home: FileHome) -> None:
    """A canary adds a version and changes an alias."""

    def canary(doc: dict[str, Any]) -> dict[str, Any]:
        doc, number = add_version(doc, "ant", {"digest": "d3", "path": "p"}, makes_current=False)
        return give_share(doc, "support", f"ant@{number}", 5.0)

    before = doc_of(home)
    make(home, "canary", canary)
    rolled_back(home, "support")
    after = doc_of(home)
    assert (after["adapters"], after["aliases"]) == (before["adapters"], before["aliases"])


def test_what_was_edited_by_hand_is_not_undone(home: FileHome) -> None:
    """The history cannot know what the edit was for."""
    home.file.write_text(home.file.read_text().replace("ant@2: 5", "ant@2: 10").replace("ant: 95", "ant: 90"))
    with pytest.raises(ChangeRefused, match=r"'support' is not as 'alias' of .* left it"):
        rolled_back(home, "support")


def test_undoing_what_others_need_is_refused(home: FileHome) -> None:
    """The alias still leads to the version whose addition would be undone."""
    with pytest.raises(ChangeRefused, match="no version 2"):
        rolled_back(home, "ant")


def test_records_are_json_a_program_can_read(home: FileHome) -> None:
    """The form that docs/registry.md gives."""
    record = json.loads(home.notes()[-1])
    assert set(record) == {"id", "at", "by", "what", "before", "after", "changes", "undoes"}
    assert record["changes"] == [
        {"where": ["aliases", "support"], "from": None, "to": {"targets": {"ant": 95, "ant@2": 5}}}
    ]
