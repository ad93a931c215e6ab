"""`make docs` writes the generated parts of the documents, `make docs-check` compares them and follows every link.

python ci/docs.py          write
python ci/docs.py --check  compare; exit 1 and say what differs
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from cli_reference import reference

from adapter_slots.metrics import FAMILIES
from adapter_slots.transitions import TRANSITIONS
from lora_slots.repo_rules import RULES as REPO_RULES
from trtllm_lora.profile_rules import RULES as PROFILE_RULES

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[[^\]]*\]\(([^)#:]+)(?:#[^)]*)?\)")


def metrics_table() -> str:
    """The families of `adapter_slots.metrics` as a table."""
    rows = ["| family | type | labels | meaning |", "| --- | --- | --- | --- |"]
    for name, family in FAMILIES.items():
        labels = ", ".join(f"`{label}`" for label in family.labels)
        rows.append(f"| `{name}` | {family.kind} | {labels} | {family.help} |")
    return "\n".join(rows)


def slot_states() -> str:
    """The transition table of `adapter_slots.transitions`, drawn and in words."""
    lines = ["```mermaid", "stateDiagram-v2"]
    ids = {state: state.replace("→", "_to_").replace(" ", "_") for row in TRANSITIONS for state in (row.state, row.to)}
    lines += [f'    state "{state}" as {name}' for state, name in ids.items()]
    lines += [f"    {ids[row.state]} --> {ids[row.to]}: {row.step}" for row in TRANSITIONS]
    lines += ["```", "", "| state | step | to | when |", "| --- | --- | --- | --- |"]
    lines += [f"| {row.state} | {row.step} | {row.to} | {row.when} |" for row in TRANSITIONS]
    return "\n".join(lines)


def profile_rules() -> str:
    """The rules of an engine profile: `trtllm_lora.profile_rules`."""
    rows = ["| rule | a profile has | because |", "| --- | --- | --- |"]
    for rule in PROFILE_RULES:
        says = f"(warned of) {rule.says}" if rule.warning else rule.says
        rows.append(f"| `{rule.name}` | {says} | {rule.why} |")
    return "\n".join(rows)


def repo_rules() -> str:
    """What `repo check` finds: `lora_slots.repo_rules`."""
    rows = ["| rule | found |", "| --- | --- |"]
    return "\n".join([*rows, *(f"| `{name}` | {text} |" for name, text in REPO_RULES.items())])


GENERATED = {
    ("docs/metrics.md", "metrics"): metrics_table,
    ("docs/slot-states.md", "states"): slot_states,
    ("docs/engines.md", "profile rules"): profile_rules,
    ("docs/engines.md", "repo rules"): repo_rules,
    ("docs/cli.md", "commands"): reference,
}
"""(document, marker) -> what stands between the marker's two comments."""


def broken_links(document: Path) -> list[str]:
    """Relative links of a document that lead nowhere."""
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = [found.group(1) for found in LINK.finditer(text)]
    return [
        f"{document.relative_to(ROOT)}: no {target}" for target in targets if not (document.parent / target).exists()
    ]


def main() -> int:
    """Write or compare; returns the exit code."""
    check, problems = "--check" in sys.argv[1:], []
    for (name, marker), make in GENERATED.items():
        file = ROOT / name
        text = file.read_text(encoding="utf-8")
        begin, end = f"<!-- generated: {marker} -->", f"<!-- end: {marker} -->"
        before, _, rest = text.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            problems.append(f"{name}: the markers of {marker} are missing")
            continue
        fresh = f"{before}{begin}\n{make()}\n{end}{after}"
        if check and fresh != text:
            problems.append(f"{name}: {marker} is out of date; run make docs")
        elif fresh != text:
            file.write_text(fresh, encoding="utf-8")
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md")), *sorted(ROOT.glob("*/*.md"))]:
        problems += broken_links(document)
    for problem in sorted(set(problems)):
        print(problem)  # noqa: T201 - a command's output
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
