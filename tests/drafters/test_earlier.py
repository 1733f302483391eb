"""Earlier answers: found as by a plain search of all that fit, only in their scope, and copied."""

from __future__ import annotations

import numpy as np
import pytest

from fakes import tokens
from llamaspec.drafters.alignment import LONGEST_MATCH
from llamaspec.drafters.earlier import BEGINNING, MIN_MATCH, N_ANSWERS, N_TOKENS, N_TRIED, EarlierAnswers
from llamaspec.drafters.ngram import SURE, NgramDrafter
from llamaspec.length.fixed import FixedLength
from llamaspec.values import Draft, Source, TokenArray

PROMPT = tokens(*range(1000, 1060))
ANSWER = tokens(*range(100, 160))


def answers_of(*given: tuple[TokenArray, TokenArray], scope: str = "") -> EarlierAnswers:
    answers = EarlierAnswers(1 << 12, 64)
    for prompt, answer in given:
        answers.of(scope).add(prompt, answer)
    return answers


def n_matching(text: list[int], place: int, end: list[int]) -> int:
    """Return how many tokens before a place in a text equal the last ones of a sequence."""
    n = 0
    while n < min(place, len(end), LONGEST_MATCH) and text[place - 1 - n] == end[-1 - n]:
        n += 1
    return n


def test_answers_of_another_scope_do_not_hide_any() -> None:
    """Only the latest places with a hash are compared: so one user learnt what others' answers contain."""
    answers = answers_of((PROMPT, ANSWER), scope="one")
    for _ in range(N_TRIED):
        answers.of("two").add(PROMPT, ANSWER)
    assert answers.of("one").longest_match(ANSWER[:20], 0) is not None


@pytest.mark.parametrize("seed", range(8))
def test_the_longest_match_is_that_of_a_plain_search(seed: int) -> None:
    """Texts of few different tokens; the ring has room for some of them, and is filled many times."""
    random = np.random.default_rng(seed)
    answers, kept = EarlierAnswers(256, 5), list[tuple[list[int], str]]()
    for _ in range(40):
        prompt, answer = (random.integers(0, 6, random.integers(5, 40)).astype(np.int32) for _ in range(2))
        scope = "ab"[random.integers(2)]
        answers.of(scope).add(prompt, answer)
        kept.append((answer.tolist(), scope))
        sequence = random.integers(0, 6, 50).astype(np.int32)
        sequence[20:45] = np.resize(answer, 25)  # so that there are long matches, too
        for n in range(MIN_MATCH, 50, 3):
            places = [
                (n_matching(text, i, sequence[:n].tolist()), text[i])
                for text, whose in kept[-len(answers) :]
                for i in range(MIN_MATCH, len(text))
                if whose == scope
            ]
            longest = max((length for length, _ in places), default=0)
            found = answers.of(scope).longest_match(sequence[:n], 0)
            if found is None:
                assert longest < MIN_MATCH
            else:
                assert (found.n_matched, found.text[found.at]) in places
                assert found.n_matched == longest
                assert answers.of(scope).longest_match(sequence[:n], longest) is None
    assert 1 < len(answers) <= 5
    answers.clear()
    assert answers.of("a").longest_match(sequence, 0) is answers.of("a").most_similar(sequence) is None


def test_a_match_does_not_reach_into_the_prompt() -> None:
    answers = answers_of((PROMPT, ANSWER))
    found = answers.of("").longest_match(np.concatenate((PROMPT, ANSWER[:5])), 0)
    assert found is not None
    assert (found.n_matched, found.text[found.at]) == (5, ANSWER[5])
    assert answers.of("").longest_match(PROMPT[:20], 0) is None


def test_the_oldest_answers_make_room() -> None:
    answers = EarlierAnswers(1000, 50)
    for i in range(30):
        answers.of("").add(tokens(*range(100 * i, 100 * i + 20)), tokens(*range(100 * i + 20, 100 * i + 90)))
    found = [answers.of("").longest_match(tokens(*range(100 * i + 30, 100 * i + 40)), 0) for i in range(30)]
    assert [each is not None for each in found] == [False] * (30 - len(answers)) + [True] * len(answers)
    assert 9 <= len(answers) <= 11


def test_the_memory_is_bounded() -> None:
    """Not the values of attributes, but the bytes of all arrays."""
    answers = EarlierAnswers()
    n_bytes = sum(each.nbytes for each in vars(answers).values() if isinstance(each, np.ndarray))
    assert n_bytes < 32 << 20
    assert N_TOKENS / N_ANSWERS >= 512, "an answer and the end of its prompt"
    answers.of("").add(PROMPT, np.zeros(1 << 22, np.int32))
    assert len(answers) == 1


def test_a_text_keeps_its_tokens_while_others_replace_it() -> None:
    answers = answers_of((PROMPT, ANSWER))
    found = answers.of("").longest_match(ANSWER[:10], 0)
    assert found is not None
    before = found.text.copy()
    for i in range(200):
        answers.of("").add(PROMPT, ANSWER + i)
    assert np.array_equal(found.text, before)


@pytest.mark.parametrize("place", [3, 30, 57])
def test_a_prompt_with_a_small_change_finds_the_answer(place: int) -> None:
    """At its beginning, in the middle and at the end; among answers to other prompts."""
    others = [(tokens(*range(2000 + 70 * i, 2060 + 70 * i)), ANSWER + 1 + i) for i in range(9)]
    answers = answers_of(*others[:5], (PROMPT, ANSWER), *others[5:])
    changed = PROMPT.copy()
    changed[place] = 7
    found = answers.of("").most_similar(changed)
    assert found is not None
    assert found.text[found.at] == ANSWER[0]
    assert 0.6 < found.similarity < 1.0
    assert answers.of("").most_similar(tokens(*range(5000, 5060))) is None
    assert answers.of("other").most_similar(PROMPT) is None


def proposed(drafter: NgramDrafter, context: TokenArray, n: int = 4) -> Draft:
    return drafter.propose(context, FixedLength(n))


def drafter_of(prompt: TokenArray, *given: tuple[TokenArray, TokenArray], scope: str = "") -> NgramDrafter:
    drafter = NgramDrafter(earlier=answers_of(*given).of(scope), is_end=lambda token: token == 159)
    drafter.prepare(prompt)
    return drafter


def test_an_answer_is_copied_from_the_first_token_to_its_end() -> None:
    drafter = drafter_of(PROMPT, (PROMPT, ANSWER))
    draft = proposed(drafter, PROMPT)
    assert (draft.source, draft.tokens.tolist()) == (Source.EARLIER, [100, 101, 102, 103])
    assert draft.confidences[0] == BEGINNING / (BEGINNING + 1)
    rest = np.concatenate((PROMPT, ANSWER[:-2]))
    assert proposed(drafter, rest, 9).tokens.tolist() == [158, 159]


def test_a_number_that_differs_between_prompts_is_replaced_in_the_answer() -> None:
    """The alignment follows both prompts, so it knows that 7 stands for 1030."""
    changed, answer = PROMPT.copy(), ANSWER.copy()
    changed[30], answer[10] = 7, 1030
    drafter = drafter_of(changed, (PROMPT, answer))
    context = np.concatenate((changed, answer[:9]))
    assert proposed(drafter, context).tokens.tolist() == [109, 7, 111, 112]


def test_the_next_turn_of_a_conversation_does_not_repeat_the_last_answer() -> None:
    prompt = np.concatenate((PROMPT, ANSWER[:4], tokens(3000, 3001, 3002)))
    given = PROMPT, ANSWER[:4]
    assert answers_of(given).of("").most_similar(prompt) is not None, "the prompts are similar"
    assert not len(proposed(drafter_of(prompt, given), prompt))


def test_an_answer_that_has_begun_is_continued() -> None:
    """A client may send the beginning of the answer, and a text to continue may end differently."""
    begun = np.concatenate((PROMPT, ANSWER[:9]))
    assert proposed(drafter_of(begun, (PROMPT, ANSWER)), begun).tokens.tolist() == [109, 110, 111, 112]
    changed = np.append(PROMPT[:-1], np.int32(7))
    assert proposed(drafter_of(changed, (PROMPT, ANSWER)), changed).tokens.tolist() == [100, 101, 102, 103]


def test_the_first_token_is_as_sure_as_the_prompts_are_similar() -> None:
    """All prompts of a chat template end alike. That is no match, before the first token and after it."""
    other = np.concatenate((tokens(*range(4000, 4020)), PROMPT[20:]))
    draft = proposed(drafter_of(other, (PROMPT, ANSWER)), other)
    assert draft.tokens.tolist() == [100, 101, 102, 103]
    assert draft.confidences[0] < BEGINNING / (BEGINNING + 1)
    unlike = np.append(tokens(*range(4000, 4050)), PROMPT[50:])
    drafter = drafter_of(unlike, (PROMPT, ANSWER))
    assert not len(proposed(drafter, unlike))
    assert not len(proposed(drafter, np.append(unlike, ANSWER[:3])))
    assert len(proposed(drafter, np.append(unlike, ANSWER[:4])))


def test_other_scopes_are_not_copied() -> None:
    assert not len(proposed(drafter_of(PROMPT, (PROMPT, ANSWER), scope="other"), PROMPT))
    context = np.concatenate((PROMPT[:9], ANSWER[:9]))
    assert len(proposed(drafter_of(PROMPT[:9], (PROMPT[30:], ANSWER)), context))
    assert not len(proposed(drafter_of(PROMPT[:9], (PROMPT[30:], ANSWER), scope="other"), context))


def test_the_source_that_agrees_longer_is_copied() -> None:
    """The file in the prompt up to the place of an edit, the earlier answer from then on."""
    file = tokens(*range(100, 140))
    edited = np.concatenate((file[:20], tokens(7, 8, 9), file[20:]))
    prompt = np.concatenate((file, PROMPT))
    drafter = drafter_of(prompt, (PROMPT[:30], edited))
    n_found = dict[Source, int]()
    context = np.concatenate((prompt, edited[:4]))
    for token in edited[4:40].tolist():
        draft = proposed(drafter, context)
        if len(draft) and draft.tokens[0] == token:
            n_found[draft.source] = n_found.get(draft.source, 0) + 1
        context = np.append(context, np.int32(token))
    assert n_found[Source.NGRAM] > SURE
    assert n_found[Source.EARLIER] > 10
    assert sum(n_found.values()) >= 33
