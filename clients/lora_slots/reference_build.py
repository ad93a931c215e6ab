"""The build of the reference engine as a step of the pipeline: one command, its log kept like any other's.

python -m lora_slots.reference_build --profile PROFILE --base DIR --out DIR
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from trtllm_lora import ContractError
from trtllm_lora.pipeline import BuildError, BuildPlan, base_problems, fingerprint
from trtllm_lora.pipeline.steps import MEMO_FILE, Step, make_step
from trtllm_lora.profile import EngineProfile, load_profile


def plan_reference(profile: EngineProfile, file: Path, cache: Path, base: Path) -> BuildPlan:
    """The one step of a reference engine: weights, config.json and a link to the base.

    Raises:
        BuildError: the base is not the profile's.
    """
    problems = base_problems(profile, base)
    if problems:
        raise BuildError("\n".join(problems))
    facts = {
        "base": fingerprint(base, cache / MEMO_FILE),
        "base_path": str(base.resolve()),  # the engine links to it
        "architecture": profile.model.architecture,  # older builds wrote Llama's whatever it was
        "engine": profile.engine.model_dump(mode="json"),
        "lora": profile.lora.model_dump(mode="json"),
    }
    return BuildPlan(profile, (make_step(cache, "engine", _command(file, base), facts),), None)


def plan_unmade(profile: EngineProfile, file: Path, cache: Path, base: Path) -> BuildPlan:
    """The same step of a base that is not there yet, to be looked at: its key hangs on the base's bytes."""
    return BuildPlan(profile, (Step("engine", _command(file, base), {}, "", cache / "engine-KEY"),), None)


def _command(file: Path, base: Path) -> tuple[str, ...]:
    words = {"--profile": file.absolute(), "--base": base.absolute(), "--out": "{out}"}
    program = (sys.executable, "-m", "lora_slots.reference_build")
    return (*program, *(str(word) for pair in words.items() for word in pair))


def main(arguments: Sequence[str] | None = None) -> int:
    """Build; returns the exit status."""
    parser = argparse.ArgumentParser(prog="lora_slots.reference_build", allow_abbrev=False)
    for name in ("--profile", "--base", "--out"):
        parser.add_argument(name, type=Path, required=True)
    options = parser.parse_args(arguments)
    from reference_engine import build_engine
    from reference_engine.errors import EngineDirectoryError, UnsupportedModel

    try:
        profile = load_profile(options.profile)
        build_engine(
            options.base,
            options.out,
            lora_modules=profile.lora.modules,
            max_lora_rank=profile.lora.max_rank,
            dtype=profile.engine.dtype,
            max_batch_size=profile.engine.max_batch_size,
            max_seq_len=profile.engine.max_seq_len,
            wrote=_report,
        )
    except (ContractError, EngineDirectoryError, UnsupportedModel) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


def _report(done: int, total: int) -> None:
    if done == total or done % max(1, total // 10) == 0:
        sys.stdout.write(f"{done} of {total} tensors\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
