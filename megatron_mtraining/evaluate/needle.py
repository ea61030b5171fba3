"""Needle in a haystack: a number that a sentence states, at each depth of a long text."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..errors import invalid
from .sample import Sample
from .source import Source

NAME = "niah"
MAX_NEW_TOKENS = 16

_HEAD = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize them. "
    "I will quiz you about the numbers afterwards.\n"
)
_NEEDLE = " One of the special magic numbers for {key} is: {value}."
_QUESTION = "\nWhat is the special magic number for {key} mentioned in the provided text?"
_LEAD = " The special magic number for {key} mentioned in the provided text is"

KEYS = """
    amber anchor apricot barley basil beacon bramble bronze candle canyon carbon cedar cinder clover cobalt copper coral
    cotton cypress dahlia ember fennel flint garnet ginger glacier granite harbor hazel hollow indigo island ivory
    jasmine juniper lantern lemon linen lotus magnet maple marble meadow mercury nickel oasis onyx orchid pepper prairie
    quartz raven saffron sierra silver summit thistle timber topaz tulip velvet walnut willow zephyr
""".split()


def samples(source: Source, length: int) -> Iterator[Sample]:
    """Yield ``source.samples`` samples for each depth.

    Raises:
        ValueError: the length has no room for needles and question.
    """
    number = 0
    for depth in np.linspace(0, 1, source.depths) if source.depths > 1 else [0.5]:
        for _ in range(source.samples):
            yield _sample(source, length, number, float(depth))
            number += 1


def _sample(source: Source, length: int, number: int, depth: float) -> Sample:
    rng = source.rng(NAME, length, number)
    keys = [KEYS[i] for i in rng.permutation(len(KEYS))[: source.needles]]
    values = [str(value) for value in rng.integers(10**6, 10**7, size=len(keys))]
    needles = [source.encode(_NEEDLE.format(key=key, value=value)) for key, value in zip(keys, values, strict=True)]
    before, after = source.around
    head = np.concatenate([before, source.encode(_HEAD)])
    question, lead = (text.format(key=keys[0]) for text in (_QUESTION, _LEAD))
    # Behind a chat template the answer begins; without one the question does not end.
    tail = np.concatenate([source.encode(question), after, source.encode(lead.lstrip() if source.chat else lead)])
    count = length - MAX_NEW_TOKENS - len(head) - len(tail) - sum(map(len, needles))
    if count < 1:
        raise invalid("--lengths", f"at least {length - count + 1} for {NAME}", length)
    hay = source.haystack(count, rng)
    depths = [depth, *rng.random(len(keys) - 1)]
    positions = [source.sentence_end(hay, int(each * count)) for each in depths]
    parts, last = [head], 0
    for position, needle in sorted(zip(positions, needles, strict=True), key=lambda pair: pair[0]):
        parts += [hay[last:position], needle]
        last = position
    return Sample(
        benchmark=NAME,
        length=length,
        number=number,
        tokens=np.concatenate([*parts, hay[last:], tail]),
        answers=(values[0],),
        max_new_tokens=MAX_NEW_TOKENS,
        coordinates={"depth": depth},
    )


def score(generated: str, answers: tuple[str, ...]) -> float:
    """Return 1 if what was generated contains the number."""
    return float(any(answer in generated for answer in answers))
