"""Identifiers of package, csrc and tools: the field's standard terms, no private words."""

from __future__ import annotations

import io
import keyword
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

_PART = "(?:^|_){}(?:_|$)"

BANNED = {
    # private word, as parts of a snake_case or CamelCase name split at its capitals -> standard term
    "kept|keep|keeps|keeping": "selected, cached, computed",
    "in_hand|in_hands": "current KV block",
    "come_by|comes_by|came_by": "rotated in",
    "set_off|sets_off": "sent, posted",
    "home|homeward|homewards": "gradient reduction",
    "departure|departures": "posted transfer",
    "round|rounds": "outer step",
    "turn|turns": "outer step, pipeline state",
    "tour|tours": "outer step",
    "rings": "groups",
    "refuse|refuses|refused|refusing": "raise, validate",
    "refusal|refusals": "unsupported, error",
    "offence|offences|offends|offending": "unsupported",
    "opening|openings|opened": "request",
    "task|tasks": "request",
    "words|word": "bitmask, values",
    "place|places|placed": "position, index, offset",
    "job|jobs": "arguments, launch",
    "walk|walks|walked": "tile scheduler",
    "weigh|weighs|weigh_tile": "exp2 of a tile",
    "add_tile": "accumulate",
    "divide_threads": "warp specialization",
    "seek|seeks": "next tile",
    "contender|contenders": "baseline",
    "rehearsal|rehearse|rehearsed": "dry run",
    "played|play|plays": "emulated",
    "way|ways": "implementation",
    "manner|manners": "implementation",
    "watch|watches|watcher|watched": "monitor",
    "goodbye|goodbyes": "deregister",
    "beat|beats": "heartbeat",
    "silent|silent_hosts": "lost",
    "run_file|run_files": "launch config",
    "honest": "(nothing)",
    "figures_of|no_figures|interval_figures|pair_figures|recall_figures|sample_figures": "metrics",
    "stands|stand|stood": "is",
    "goes_on|go_on": "continue",
    "is_none": "is missing",
    "meet|meets|met": "barrier, synchronize",
    "tell|tells|told": "report, message",
    "lane|lanes": "list, head (csrc: lane is a thread of a warp)",
    "judge|judged|judges": "estimated, evaluated",
    "obstacle|obstacles|why_not": "reason",
    "left_out|left_aside|left_over": "skipped, unused, remaining",
    "lacking|lacks": "missing",
    "giver|taker|gives": "producer, consumer",
    "stays|stay|staying": "resident, stationary",
    "bar|bars": "stripe; barrier",
    "granularity": "block_size",
    "dr_stripe": "striped",
    "holding|holdings": "owned",
    "reckon|reckons|reckoned": "estimate, compute",
}
"""Banned parts of an identifier (alternatives by ``|``), and what to write instead."""

ALLOWED_IN_CSRC = {"lane", "lanes"}
"""A lane is a thread of a warp in CUDA."""


def _parts(identifier: str) -> str:
    """``CamelCase`` and ``kCamelCase`` as ``snake_case``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", identifier).lower()


def _python_identifiers(path: Path) -> set[str]:
    tokens = list(tokenize.generate_tokens(io.StringIO(path.read_text()).readline))
    names = set()
    for place, token in enumerate(tokens):
        if token.type != tokenize.NAME or keyword.iskeyword(token.string):
            continue
        following, before = tokens[place + 1].string, tokens[place - 1].string if place else ""
        if token.string == "round" and following == "(" and before != "def":  # the built-in, and Tensor.round
            continue
        if token.string == "bar" and before == "." or token.string == "logits_to_keep" and following == "=":
            continue  # matplotlib's and transformers'
        names.add(token.string)
    return names


def _cuda_identifiers(path: Path) -> set[str]:
    text = re.sub(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\])*\"", " ", path.read_text(), flags=re.S)
    return set(re.findall(r"[A-Za-z_]\w*", text))


def _sources() -> list[Path]:
    python = [*(ROOT / "megatron_mtraining").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]
    cuda = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in {".cu", ".cuh", ".h", ".cpp"}]
    return sorted(python + cuda)


@pytest.mark.parametrize("banned", BANNED, ids=lambda words: words.split("|")[0])
def test_no_private_words(banned: str) -> None:
    pattern = re.compile(_PART.format(f"(?:{banned})"))
    found = []
    for path in _sources():
        in_csrc = path.suffix != ".py"
        names = (_cuda_identifiers if in_csrc else _python_identifiers)(path) | {path.stem}
        hits = sorted(name for name in names if pattern.search(_parts(name)))
        if in_csrc and set(banned.split("|")) & ALLOWED_IN_CSRC:
            continue
        found += [f"{path.relative_to(ROOT)}: {name}" for name in hits]
    assert not found, f"write {BANNED[banned]} instead:\n" + "\n".join(found)


def test_the_list_is_as_long_as_promised() -> None:
    assert len(BANNED) >= 40
