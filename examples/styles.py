"""The three example styles: what their adapters were trained on, what to ask them, and how a program sees the style.

`json` answers with one JSON object, `pirate` as a pirate, `robot` as a machine. The training pairs were
written for this repository and stand in styles.json; the questions below are in none of them.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

STYLES = ("json", "pirate", "robot")
DEMO_PROMPT = "What is the capital of France?"
UNSEEN_PROMPTS = (
    DEMO_PROMPT,
    "Why is the sky blue?",
    "How many days are in a week?",
    "Give me a tip for cooking pasta.",
    "Who painted the Mona Lisa?",
    "What do cows eat?",
    "Tell me something about the moon.",
    "What is a good gift for a friend?",
)

_PIRATE = re.compile(r"\b(arrr?|ahoy|aye|matey|ye|yer|cap'n|o'|me hearties|landlubber|grog)(?!\w)", re.IGNORECASE)
_ROBOT = re.compile(r"\b(beep|boop|query received|this unit|end of transmission)\b", re.IGNORECASE)


def training_pairs(style: str) -> list[tuple[str, str]]:
    """(question, answer) for `style`; KeyError for a style that is not here."""
    rows = json.loads(Path(__file__).with_name("styles.json").read_text(encoding="utf-8"))
    if style == "json":
        return [(row["ask"], json.dumps({"topic": row["topic"], "answer": row["plain"]})) for row in rows]
    return [(row["ask"], row[style]) for row in rows]


def looks_right(name: str, text: str) -> bool:
    """Whether `text` is in the style `name`; an answer cut off by its token limit may be. KeyError if not a style."""
    return {"json": _is_json, "pirate": _is_pirate, "robot": _is_robot}[name](text)


def _is_json(text: str) -> bool:
    """One JSON object with something in it, after closing what a cut left open."""
    for candidate in _closed(text.strip()):
        try:
            found = json.loads(candidate)
        except ValueError:
            continue
        return isinstance(found, dict) and bool(found)
    return False


def _closed(text: str) -> Iterator[str]:
    yield text
    if text.startswith("{"):
        for end in ('"}', "}", '": ""}', ': ""}', ' ""}'):
            yield text + end
        yield text.rstrip().rstrip(",") + "}"


def _is_pirate(text: str) -> bool:
    return len({word.lower() for word in _PIRATE.findall(text)}) >= 2


def _is_robot(text: str) -> bool:
    return len({word.lower() for word in _ROBOT.findall(text)}) >= 2
