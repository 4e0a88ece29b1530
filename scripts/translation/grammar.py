"""A translation task drawn from a grammar, and the score of translations.

The source has its verbs at the end, determiners by gender, case and number, and adjectives that do
not change. The target has its verbs second, adjectives that agree with the gender of the *target's*
noun, most of them behind it, and adverbs at the end:

    ein_n_nom_pl n0_pl ein_f_acc_pl a0 n5_pl , der_f_nom_pl der_f_acc_sg n5_sg v4_pl_now , v2_pl_now
    UN_f_pl N0a_pl V2_pl_now UN_f_pl N5a_pl A0_f_pl QUE V4_pl_now LE_f_sg N5a_sg P2

So words move across clauses of any length, and a verb agrees with a subject that may be separated
from it by relative clauses. Subject or object comes first. One noun in four has two meanings,
decided by the kind of its clause's verb, which comes last. One verb in four is two words in the
target, with its object between them. Words are drawn by Zipf's law, so many forms of a test set
were seldom seen. One target word in five has a synonym, drawn at random: no model can know which,
so a perfect one scores below 100.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import exp, log
from typing import NamedTuple

import numpy as np

from dlrm_hybrid.rng import fold

NOUNS, ADJECTIVES, VERBS, ADVERBS = 60, 16, 24, 8
SYNONYM_SHARE = 0.4  # of the uses of a word that has one
MAX_DEPTH = 2  # of relative clauses
PAD, BEGIN, END = 0, 1, 2
SPECIAL = ("<pad>", "<s>", "</s>")
GENDERS, CASES, NUMBERS, TENSES = "mfn", ("nom", "acc"), ("sg", "pl"), ("now", "past")
MAX_ORDER = 4  # of the n-grams of BLEU


class Pair(NamedTuple):
    """A sentence and its translation, as words."""

    source: list[str]
    target: list[str]


class Phrase(NamedTuple):
    """A noun phrase: its words in both languages, the number of its noun."""

    source: list[str]
    target: list[str]
    number: str


class Grammar:
    """Draws pairs of sentences; the same words and rules for every seed.

    Args:
        seed: of the sentences.
    """

    def __init__(self, seed: int) -> None:
        words = np.random.default_rng(fold(0, "words"))
        self._gender = words.choice(list(GENDERS), NOUNS).tolist()
        self._target_gender = words.choice(list("mf"), (NOUNS, 2)).tolist()
        self._ambiguous = (words.random(NOUNS) < 0.25).tolist()
        self._before = (words.random(ADJECTIVES) < 0.25).tolist()
        self._separable = (words.random(VERBS) < 0.25).tolist()
        self._synonyms = {
            f"{kind}{number}"
            for kind, count in (("N", NOUNS), ("V", VERBS), ("A", ADJECTIVES))
            for number in range(count)
            if words.random() < 0.2
        }
        self._chances = {count: _zipf(count) for count in (NOUNS, ADJECTIVES, VERBS, ADVERBS)}
        self._draws = np.random.default_rng(fold(seed, "sentences"))

    def pair(self) -> Pair:
        """Draw a sentence with its translation."""
        source: list[str] = []
        end: list[str] = []
        if self._happens(0.4):
            adverb = self._word(ADVERBS)
            source.append(f"d{adverb}")
            end.append(f"D{adverb}")
        verb = self._word(VERBS)
        subject = self._phrase("nom", verb, 0)
        clause = self._clause(verb, subject.number, 0)
        first, second = subject.source, clause.source[:-1]
        if self._happens(0.3):  # the object: cases alone say which is which
            first, second = second, first
        source += [*first, *second, clause.source[-1]]
        return Pair(source, [*subject.target, *clause.target, *end])

    def _clause(self, verb: int, number: str, depth: int) -> Pair:
        """Object and verb, which is the last word of the source."""
        other, tense = self._phrase("acc", verb, depth), self._one(TENSES)
        target = [f"{self._choice(f'V{verb}')}_{number}_{tense}", *other.target]
        if self._separable[verb]:
            target.append(f"P{verb % 5}")
        return Pair([*other.source, f"v{verb}_{number}_{tense}"], target)

    def _phrase(self, case: str, verb: int, depth: int) -> Phrase:
        noun, number = self._word(NOUNS), self._one(NUMBERS)
        sense = verb % 2 if self._ambiguous[noun] else 0
        gender = self._target_gender[noun][sense]
        adjectives = [self._word(ADJECTIVES) for _ in range(int(self._draws.integers(0, 3)))]
        changed = [f"{self._choice(f'A{one}')}_{gender}_{number}" for one in adjectives]
        before = [word for one, word in zip(adjectives, changed, strict=True) if self._before[one]]
        behind = [word for word in changed if word not in before]
        source_article, article = (("der", "LE"), ("ein", "UN"))[self._happens(0.5)]
        source = [f"{source_article}_{self._gender[noun]}_{case}_{number}"]
        source += [*(f"a{one}" for one in adjectives), f"n{noun}_{number}"]
        target = [f"{article}_{gender}_{number}", *before]
        target += [f"{self._choice(f'N{noun}')}{'ab'[sense]}_{number}", *behind]
        if depth < MAX_DEPTH and self._happens(0.25):
            inner = self._clause(self._word(VERBS), number, depth + 1)
            source += [",", f"der_{self._gender[noun]}_nom_{number}", *inner.source, ","]
            target += ["QUE", *inner.target]
        return Phrase(source, target, number)

    def _word(self, count: int) -> int:
        return int(np.searchsorted(self._chances[count], self._draws.random()))

    def _choice(self, word: str) -> str:
        is_other = word in self._synonyms and self._happens(SYNONYM_SHARE)
        return f"{word}'" if is_other else word

    def _one(self, choices: Sequence[str]) -> str:
        return choices[int(self._draws.integers(len(choices)))]

    def _happens(self, chance: float) -> bool:
        return bool(self._draws.random() < chance)


def _zipf(count: int) -> np.ndarray:
    """Cumulated chances that fall as 1 / (rank + 2)."""
    weights = 1.0 / (np.arange(count) + 3.0)
    return np.cumsum(weights) / weights.sum()


class Vocabulary:
    """Numbers of words, in the order in which sentences bring them.

    Args:
        sentences: what brings words; all others are refused.
    """

    def __init__(self, sentences: Iterable[Sequence[str]]) -> None:
        names = dict.fromkeys([*SPECIAL, *(word for one in sentences for word in one)])
        self._words = list(names)
        self._numbers = {word: number for number, word in enumerate(names)}

    def __len__(self) -> int:
        return len(self._words)

    def ids(self, words: Sequence[str]) -> list[int]:
        """A sentence as numbers, between BEGIN and END."""
        return [BEGIN, *(self._numbers[word] for word in words), END]

    def words(self, ids: Sequence[int]) -> list[str]:
        """Numbers as a sentence: up to the first END, without BEGIN and PAD."""
        ended = ids[: ids.index(END)] if END in ids else ids
        return [self._words[number] for number in ended if number not in (PAD, BEGIN)]


def bleu(translations: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> float:
    """BLEU of a corpus with one reference each, 0 to 100, without smoothing.

    The geometric mean of the precisions of 1- to 4-grams, times exp(1 - r / c) where the c words of
    all translations are fewer than the r of all references.

    Source: Papineni et al., BLEU: a method for automatic evaluation of translation, ACL 2002.
    """
    matches, totals = [0] * MAX_ORDER, [0] * MAX_ORDER
    for translation, reference in zip(translations, references, strict=True):
        for order in range(1, MAX_ORDER + 1):
            ours, theirs = _grams(translation, order), _grams(reference, order)
            matches[order - 1] += (ours & theirs).total()
            totals[order - 1] += ours.total()
    if not all(matches):
        return 0.0
    precision = exp(sum(log(m / t) for m, t in zip(matches, totals, strict=True)) / MAX_ORDER)
    ours, theirs = sum(map(len, translations)), sum(map(len, references))
    return 100.0 * precision * exp(min(0.0, 1.0 - theirs / ours))


def _grams(words: Sequence[str], order: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[at : at + order]) for at in range(len(words) - order + 1))
