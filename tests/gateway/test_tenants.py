"""Tenants without a server: the file, keys, who may use what, and limits at given times."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from adapter_slots.registry_entries import Alias, Content, Entry
from lora_slots.cli import application
from lora_slots.gateway.keys import add_key, add_tenant, remove_tenant, revoke_key
from lora_slots.gateway.names import allowed, model_object, resolve, unknown
from lora_slots.gateway.tenants import Tenant, TenantsError, TenantsSource, read_tenants

NO_LIMITS: dict[str, int | None] = {}
ONE_KEY = "{{id: abcdefgh, sha256: {}}}"


def test_a_key_opens_its_tenant_and_is_nowhere_in_the_file(tmp_path: Path) -> None:
    """Nor does a key with another secret, another id, or of no form at all."""
    file = tmp_path / "tenants.yaml"
    key = add_tenant(file, "acme", ["pirate"], True, {"concurrent": 2})
    source = TenantsSource(file)
    caller = source.current().caller(key)
    assert caller is not None
    assert caller.tenant is not None
    assert (caller.tenant.name, caller.tenant.adapters, caller.tenant.limits.concurrent) == ("acme", ("pirate",), 2)
    assert key not in file.read_text()
    assert key.split("-", 2)[2] not in file.read_text()
    assert file.stat().st_mode & 0o077 == 0
    last = "A" if key[-1] != "A" else "B"
    for wrong in (key[:-1] + last, key[:3] + "00000000" + key[11:], "", "ls-", key + "x", f"{key}\n"):
        assert source.current().caller(wrong) is None
    assert not source.current().is_admin(key)


def test_keys_are_replaced_without_a_gap_and_at_once(tmp_path: Path) -> None:
    """The file is looked at on every request: a new key works, a revoked one does not, nobody restarts anything."""
    file = tmp_path / "tenants.yaml"
    first = add_tenant(file, "acme", [], True, NO_LIMITS)
    source = TenantsSource(file)
    second, admin = add_key(file, "acme"), add_key(file, None)
    assert source.current().caller(first) is not None
    assert source.current().caller(second) is not None
    assert source.current().is_admin(admin)
    assert source.current().caller(admin) is None
    revoke_key(file, first[3:11])
    assert source.current().caller(first) is None
    assert source.current().caller(second) is not None
    remove_tenant(file, "acme")
    assert source.current().caller(second) is None


def test_commands_print_json(tmp_path: Path) -> None:
    """A key with its id, by which it is taken out; and what was done."""
    file = tmp_path / "tenants.yaml"

    def run(*words: str) -> dict[str, Any]:
        done = CliRunner().invoke(application(), ["tenants", *words, "--json", "--file", str(file)])
        assert done.exit_code == 0, done.output
        return dict(json.loads(done.stdout))

    first, second, admin = run("add", "acme"), run("key", "acme"), run("key", "--admin")
    assert (first["tenant"], second["tenant"], admin["tenant"]) == ("acme", "acme", None)
    assert (second["admin"], admin["admin"]) == (False, True)
    ids = [key.id for key in read_tenants(file).tenants["acme"].keys]
    assert ids == [first["key_id"], second["key_id"]]
    assert run("key", "--revoke", first["key_id"])["revoked"] == first["key_id"]
    source = TenantsSource(file)
    assert source.current().caller(first["key"]) is None
    assert source.current().caller(second["key"]) is not None
    assert run("remove", "acme")["removed"] == "acme"
    assert read_tenants(file).tenants == {}


def test_changes_from_many_processes_lose_nothing(tmp_path: Path) -> None:
    """Each is one read, change and write under a lock."""
    file = tmp_path / "tenants.yaml"
    writers = [threading.Thread(target=add_tenant, args=(file, f"t{i}", [], True, NO_LIMITS)) for i in range(12)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert set(read_tenants(file).tenants) == {f"t{i}" for i in range(12)}


def test_mistakes_are_refused_with_words(tmp_path: Path) -> None:
    """A name twice, one that is none, an unknown key; the file stays as it was."""
    file = tmp_path / "tenants.yaml"
    add_tenant(file, "acme", [], True, NO_LIMITS)
    before = file.read_bytes()
    for mistake, words in (
        (lambda: add_tenant(file, "acme", [], True, NO_LIMITS), "already"),
        (lambda: add_tenant(file, "no way", [], True, NO_LIMITS), "tenants"),
        (lambda: add_tenant(file, "b", [], True, {"concurrent": 0}), "concurrent"),
        (lambda: add_key(file, "nobody"), "there are: acme"),
        (lambda: revoke_key(file, "00000000"), "no key"),
        (lambda: remove_tenant(file, "nobody"), "no tenant"),
    ):
        with pytest.raises(TenantsError, match=words):
            mistake()
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("schema: 2", "schema"),
        ("{", "not YAML"),
        ("schema: 1\ntenants:\n  a: {limits: {concurrent: 1}}\n  a: {}", "line 4: 'a' is there twice"),
        ("schema: 1\ntenants: {a: {adapter: []}}", "adapter"),
        ("schema: 1\ntenants: {a: {limits: {concurrent: many}}}", "concurrent"),
        ("schema: 1\ntenants: {a: {keys: [{id: abcdefgh, sha256: short}]}}", "sha256"),
        (f"schema: 1\nadmin: {{keys: [{ONE_KEY.format('a' * 64)}, {ONE_KEY.format('b' * 64)}]}}", "twice"),
        ("[]", "the file"),
    ],
)  # fmt: skip
def test_a_broken_file_is_told_and_the_last_good_one_stays(tmp_path: Path, text: str, words: str) -> None:
    """A gateway does not start with it, and one that runs keeps its tenants."""
    file = tmp_path / "tenants.yaml"
    key = add_tenant(file, "acme", [], True, NO_LIMITS)
    source = TenantsSource(file)
    file.write_text(text)
    with pytest.raises(TenantsError, match=words):
        TenantsSource(file)
    assert source.current().caller(key) is not None
    assert source.problem is not None
    file.unlink()
    assert source.current().caller(key) is not None


# who may use what ---------------------------------------------------------------------------------------------------


def entry(name: str, tenants: frozenset[str] | None = None, version: int = 1) -> Entry:
    """An adapter of a registry."""
    return Entry(name, version, f"{name}{version}", "path", tenants=tenants)


def content(*entries: Entry, **aliases: dict[str, float]) -> Content:
    """A registry."""
    versions: dict[str, dict[int, Entry]] = {}
    for one in entries:
        versions.setdefault(one.name, {})[one.version] = one
    current = {name: found[max(found)] for name, found in versions.items()}
    return Content(versions, current, {name: Alias(name, targets) for name, targets in aliases.items()})


REGISTRY = content(
    entry("pirate"), entry("pirate", version=2), entry("acme-mail"), entry("acme-chat"), entry("bolt-mail"),
    entry("vault", frozenset({"bolt"})), prod={"pirate@1": 40.0, "pirate@2": 60.0}, door={"vault": 100.0},
    mix={"pirate": 50.0, "vault": 50.0},
)  # fmt: skip
ACME = Tenant("acme", ("acme-*", "pirate", "vault", "door"))
HALF = Tenant("half", ("mix", "pirate"))
BOLT = Tenant("bolt", ("bolt-mail", "door"), base=False)


def found(model: str, tenant: Tenant | None) -> str | None:
    """What a name leads to: a reference, "base", or nothing."""
    target = resolve(REGISTRY, "llama", model, tenant, key=None, draw=0.0)
    return None if target is None else target.entry.ref if target.entry else "base"


def test_a_tenant_reaches_what_both_lists_allow() -> None:
    """Patterns and names, of adapters and aliases; the registry's own list of an adapter's tenants; the base."""
    assert found("acme-mail", ACME) == "acme-mail@1"
    assert found("pirate@1", ACME) == "pirate@1"
    assert found("llama:pirate", ACME) == "pirate@2"
    assert found("bolt-mail", ACME) is None
    assert found("prod", ACME) is None, "an alias is a name of its own"
    assert found("vault", ACME) is None, "the registry does not name acme"
    assert found("door", ACME) is None, "an alias opens nothing that its adapter keeps closed"
    assert found("door", BOLT) == "vault@1"
    assert found("llama", ACME) == found("base", ACME) == "base"
    assert found("llama", BOLT) is None
    assert found("vault", None) is None, "nobody is known to be a tenant"
    assert found("prod", None) == "pirate@1"


def test_an_alias_is_there_whole_or_not_at_all() -> None:
    """Else some sessions would be answered, and others told that there is no such model."""
    assert {resolve(REGISTRY, "llama", "mix", HALF, key=str(i), draw=0.5) for i in range(50)} == {None}
    assert "mix" not in allowed(REGISTRY, "llama", HALF)


def test_a_name_that_reads_as_the_base_is_the_base_alone() -> None:
    """An adapter `llama` or `llama:pirate` is neither listed nor asked: the base and `base:adapter` are meant."""
    both = content(entry("pirate"), entry("llama"), entry("llama:pirate", frozenset({"bolt"})))
    targets = {name: resolve(both, "llama", name, None, key=None, draw=0.0) for name in ("llama", "llama:pirate")}
    assert [target and target.entry and target.entry.ref for target in targets.values()] == [None, "pirate@1"]
    assert targets["llama"] is not None
    assert allowed(both, "llama", None) == ["llama", "pirate"]


@given(model=st.text(max_size=20) | st.sampled_from(["bolt-mail", "bolt-mail@1", "vault", "door", "prod", "bolt-mai"]))
def test_what_is_not_allowed_is_as_unknown_as_what_never_was(model: str) -> None:
    """Word for word the same 404 as for a registry that has nothing but what the tenant may use."""
    mine = content(entry("pirate"), entry("pirate", version=2), entry("acme-mail"), entry("acme-chat"))
    target = resolve(REGISTRY, "llama", model, ACME, key=None, draw=0.0)
    alone = resolve(mine, "llama", model, ACME, key=None, draw=0.0)
    assert (target is None) == (alone is None)
    seen = unknown(model, allowed(REGISTRY, "llama", ACME)).body()
    assert seen == unknown(model, allowed(mine, "llama", ACME)).body()
    assert b"bolt" not in seen.replace(model.encode(), b"")


def test_near_names_are_told() -> None:
    """Of a few and of thousands."""
    assert "pirate" in str(unknown("pirat", allowed(REGISTRY, "llama", ACME)))
    many = sorted(f"adapter-{i:05}" for i in range(10_000))
    error = unknown("adapter-0500", many)
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")
    assert "near names: adapter-050" in str(error)
    assert len(str(unknown("x" * 5000, many))) < 300


def test_model_objects_say_what_they_lead_to() -> None:
    """`root` of an adapter is its version, of an alias its heaviest target's."""
    base, adapter = (model_object(REGISTRY, "llama", name, 5) for name in ("llama", "pirate"))
    assert (base["root"], base["parent"]) == ("llama", None)
    assert (adapter["root"], adapter["parent"], adapter["created"]) == ("pirate@2", "llama", 5)
    assert model_object(REGISTRY, "llama", "prod", 5)["root"] == "pirate@2"


def test_the_files_form_is_the_one_in_the_docs(tmp_path: Path) -> None:
    """The example at the top of tenants.py is a good file."""
    import lora_slots.gateway.tenants as module

    text = str(module.__doc__).partition("\nschema")[2].partition("\n\n")[0]
    text = "schema" + text.replace("9f86…", "a" * 64).replace("60303a…", "b" * 64).replace("created: …", "created: x")
    (tmp_path / "tenants.yaml").write_text(text)
    parsed = read_tenants(tmp_path / "tenants.yaml")
    assert parsed.tenants["acme"].limits.cold_loads == 2
    assert yaml.safe_load(text)["admin"]["keys"][0]["id"] == "k3v9qd2m"
