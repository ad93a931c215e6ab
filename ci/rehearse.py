"""`make ci-rehearsal`: the jobs of .github/workflows on this machine, against a real S3 and a real Triton.

python ci/rehearse.py           all of it: the engine job in dry run, the adapter job, the deploy job
python ci/rehearse.py --small   adapter and deploy job with one adapter; what the tests run

The S3 is SeaweedFS in a temporary folder, the server is the embedded stack with the reference engine. Every step is a
command that a person could type; each is printed before it runs. What must hold is checked at the end of each job.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from fakes import seaweed  # noqa: E402 - it lies with the tests

BIN = Path(sys.executable).parent
PROFILE = ROOT / "engines" / "profiles" / "smollm2-135m.yaml"
STORE = "s3://rehearsal/models"
REGISTRY = f"{STORE}/adapters.yaml"
REFUSED, WORSE, UNAVAILABLE = 2, 3, 69


class RehearsalFailed(Exception):
    """A step did not end as it must, or what must hold does not."""


@dataclass
class Rehearsal:
    """A work folder and the environment of its commands."""

    work: Path
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, *words: str | Path, code: int = 0, quiet: bool = False) -> str:
        """Run a command to its end; its standard output. Anything but `code` ends the rehearsal."""
        _say("$ " + shlex.join(map(str, words)))
        done = subprocess.run(
            list(map(str, words)),
            cwd=ROOT,
            env={**os.environ, **self.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        _say("" if quiet else done.stdout.rstrip())
        if done.returncode != code:
            raise RehearsalFailed(f"{shlex.join(map(str, words))}: ended with {done.returncode}, not {code}")
        return done.stdout

    def slots(self, *words: str | Path) -> str:
        """`lora-slots …`."""
        return self.run("lora-slots", *words)

    def show(self, name: str) -> dict[str, Any]:
        """What the registry says of an adapter or an alias."""
        return dict(json.loads(self.run("lora-slots", "adapters", "show", name, "--json", quiet=True)))

    def job(self, name: str) -> None:
        """A heading."""
        _say(f"\n##### {name}")

    def must(self, what: str, holds: bool) -> None:
        """Say that something holds, or end."""
        if not holds:
            raise RehearsalFailed(f"this must hold and does not: {what}")
        _say(f"OK: {what}")


def engine_job(it: Rehearsal) -> None:
    """Dry: which engines would be built, by which commands; and what the GPU scripts say on a machine without one."""
    it.job("engine job, in dry run")
    profiles = sorted((ROOT / "engines" / "profiles").glob("*.yaml"))
    it.slots("engine", "check", *profiles)
    matrix = json.loads(it.slots("engine", "changed", *profiles, "--since", "", "--json"))
    compiled = [path for path in profiles if "\nruntime: tensorrt_llm" in path.read_text(encoding="utf-8")]
    all_of_them = [str(path) for path in compiled]
    it.must("without a commit to compare with, every one is built", [row["profile"] for row in matrix] == all_of_them)
    for profile in all_of_them:
        told = it.slots("engine", "build", profile, "--dry-run")
        it.must("the dry run ends in trtllm-build", "trtllm-build --checkpoint_dir" in told)
    if shutil.which("trtllm-build") is None:
        for script in ("ci/gpu/build", "ci/gpu/accept.sh"):
            it.run("sh", script, code=UNAVAILABLE)


def adapter_job(it: Rehearsal, engine: Path, adapters: Sequence[Path], name: str) -> list[str]:
    """Convert, verify, sign, publish; the versions that are new."""
    it.job(f"adapter job: {name}")
    return it.run("ci/publish-adapters", engine / "base", engine, STORE, *adapters).split()


def first_release(it: Rehearsal, engine: Path, adapters: Sequence[Path], *, small: bool) -> None:
    """A key, the first versions, and a registry that believes only this key."""
    key = it.work / "release.key"
    it.slots("adapters", "keygen", key)
    it.environment["LORA_SLOTS_SIGNING_KEY"] = str(key)
    released = adapter_job(it, engine, adapters, "the first versions")
    it.must("each adapter has a version 1", released == [f"{path.name}@1" for path in adapters])
    it.slots("adapters", "trust", f"{key}.pub", "--require", "--registry", REGISTRY)
    it.slots("adapters", "alias", "set", "support", "pirate", "--registry", REGISTRY)
    if not small:
        again = adapter_job(it, engine, adapters, "the same once more")
        it.must("what is published is not published again", again == [])


RESTART = """#!/bin/sh
# Stands for `systemctl restart`: ends the server that runs, and starts one on the repository as it is now.
cd "$(dirname "$0")"
sh stop
nohup lora-slots repo serve served/repository --log triton.log >serve.out 2>&1 </dev/null &
echo $! >pid
"""
STOP = """#!/bin/sh
cd "$(dirname "$0")"
[ -f pid ] || exit 0
kill -TERM "$(cat pid)" 2>/dev/null || exit 0
while kill -0 "$(cat pid)" 2>/dev/null; do sleep 0.1; done
"""


@contextmanager
def server(it: Rehearsal, engine: Path) -> Iterator[None]:
    """The embedded stack, put into service as an engine is; its adapters come out of the store."""
    for name, text in (("restart", RESTART), ("stop", STOP)):
        (it.work / name).write_text(text, encoding="utf-8")
    it.environment |= {
        "LORA_SLOTS_URL": f"127.0.0.1:{seaweed.free_ports(8)['s3.port']}",
        "LORA_SLOTS_REGISTRY": REGISTRY,
        "LORA_SLOTS_RESTART": f"sh {it.work / 'restart'}",
        "LORA_SLOTS_RENDER": "--set lora_router.registry_refresh_s=0.5 --set lora_router.tick_s=0.2",
    }
    try:
        deploy_engine_job(it, engine, "first")
        yield
    finally:
        it.run("sh", it.work / "stop")


def deploy_engine_job(it: Rehearsal, engine: Path, key: str, code: int = 0) -> None:
    """Fetch, render, check, restart, pre-warm, gate. The reference engine stands there already: it is not published."""
    it.job(f"deploy job of engine {key}")
    served = it.work / "served"
    served.mkdir(exist_ok=True)
    (served / f"engine-{key}").symlink_to(engine)
    it.run("ci/deploy-engine", PROFILE, f"{STORE}/engines/smollm2-135m/{key}", served, code=code)


def a_broken_engine(it: Rehearsal, engine: Path) -> None:
    """An engine that does not load is taken out of service again."""
    broken = it.work / "broken"
    shutil.copytree(engine, broken, symlinks=True)
    (broken / "rank0.safetensors").unlink()
    (broken / "rank0.safetensors").write_bytes(b"half")
    it.environment["LORA_SLOTS_UP_S"] = "60"
    deploy_engine_job(it, broken, "broken", code=1)
    answer = it.slots("generate", "--adapter", "support", "--max-tokens", "24", "Who are you?")
    it.must("the old engine serves again", "arr" in answer.lower())


def deploy_job(it: Rehearsal, refs: Sequence[str], code: int = 0) -> None:
    """Pre-warm, gate, canary, promote or take back."""
    it.job(f"deploy job: {' '.join(refs)}")
    it.run("ci/deploy", *refs, code=code)


def releases(it: Rehearsal, engine: Path, pirate: Path, *, small: bool) -> None:
    """A better version is promoted; a worse one and a damaged one are not, and nothing changes."""
    better = _changed(it.work / "better" / "pirate", pirate, scale=0.9)
    deploy_job(it, adapter_job(it, engine, [better], "a better pirate"))
    it.must("pirate@2 is current, and has all of the alias", _state(it) == (2, {"pirate@2": 100}))

    worse = _copied(it.work / "worse" / "pirate", ROOT / "examples" / "adapters" / "robot")
    deploy_job(it, adapter_job(it, engine, [worse], "a pirate that speaks like a robot"), code=WORSE)
    it.must("the canary was taken back: pirate@2 is as it was", _state(it) == (2, {"pirate@2": 100}))

    if not small:
        damaged = _changed(it.work / "damaged" / "pirate", pirate, scale=0.8)
        refs = adapter_job(it, engine, [damaged], "a pirate that is damaged in the store")
        _flip_a_byte(it, refs[0])
        deploy_job(it, refs, code=1)
        it.must("a version that cannot be served is not rolled out", _state(it) == (2, {"pirate@2": 100}))

    answer = it.slots("generate", "--adapter", "support", "--max-tokens", "24", "Who are you?")
    it.must("behind the alias still speaks a pirate", "matey" in answer.lower() or "arr" in answer.lower())


def _state(it: Rehearsal) -> tuple[int, Mapping[str, float]]:
    """Current version of pirate, and the targets of the alias."""
    return it.show("pirate")["current"], it.show("support")["targets"]


def _copied(folder: Path, adapter: Path) -> Path:
    shutil.copytree(adapter, folder)
    return folder


def _changed(folder: Path, adapter: Path, scale: float) -> Path:
    """The same adapter with another alpha, as another training might have left it."""
    file = _copied(folder, adapter) / "adapter_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["lora_alpha"] *= scale
    file.write_text(json.dumps(config), encoding="utf-8")
    return folder


def _flip_a_byte(it: Rehearsal, ref: str) -> None:
    """One byte of the weights in the store."""
    path = next(v["path"] for v in it.show("pirate")["versions"] if f"pirate@{v['version']}" == ref)
    key = f"{path.removeprefix('s3://rehearsal/')}/model.lora_weights.npy"
    client = _client(it)
    data = bytearray(client.get_object(Bucket="rehearsal", Key=key)["Body"].read())
    data[len(data) // 2] ^= 1
    client.put_object(Bucket="rehearsal", Key=key, Body=bytes(data))
    _say(f"# one bit of s3://rehearsal/{key} is flipped")


def _client(it: Rehearsal) -> Any:
    import boto3

    names = {"aws_access_key_id": "AWS_ACCESS_KEY_ID", "aws_secret_access_key": "AWS_SECRET_ACCESS_KEY"}
    given = {name: it.environment[variable] for name, variable in names.items()}
    return boto3.client("s3", endpoint_url=it.environment["AWS_ENDPOINT_URL"], region_name=seaweed.REGION, **given)


def _say(text: str) -> None:
    if text:
        print(text, flush=True)  # noqa: T201 - a command's output


def rehearse(work: Path, *, small: bool) -> None:
    """All jobs in order. Raises RehearsalFailed."""
    program = seaweed.weed()
    if program is None:
        raise RehearsalFailed("no `weed` beside this Python: run make setup")
    it = Rehearsal(work, {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "PYTHONUNBUFFERED": "1"})
    if small:
        it.environment["LORA_SLOTS_CANARY"] = "--requests 6 --max-tokens 16"
    else:
        engine_job(it)
    with seaweed.running(work / "seaweed", program) as store:
        store.client().create_bucket(Bucket="rehearsal")
        it.environment |= {**seaweed.environment(), "AWS_ENDPOINT_URL": store.url}
        engine = work / "engine"
        it.job("engine of the embedded stack")
        it.slots("engine", "build", PROFILE, "-o", engine)
        examples = ROOT / "examples" / "adapters"
        adapters = [examples / name for name in (("pirate",) if small else ("json", "pirate", "robot"))]
        first_release(it, engine, adapters, small=small)
        with server(it, engine):
            deploy_job(it, [f"{path.name}@1" for path in adapters])
            releases(it, engine, examples / "pirate", small=small)
            if not small:
                a_broken_engine(it, engine)
    it.job("rehearsed: everything held")


def main() -> int:
    """Rehearse in a temporary folder; returns the exit code."""
    parser = argparse.ArgumentParser(description="The jobs of the workflows, on this machine.", allow_abbrev=False)
    parser.add_argument("--small", action="store_true", help="one adapter, no engine job")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lora-slots-rehearsal-") as folder:
        try:
            rehearse(Path(folder), small=options.small)
        except RehearsalFailed as error:
            sys.stderr.write(f"rehearsal failed: {error}\n")
            log = Path(folder) / "triton.log"
            if log.is_file():
                sys.stderr.write("\n".join(log.read_text(errors="replace").splitlines()[-40:]) + "\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
