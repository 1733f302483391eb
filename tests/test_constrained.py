"""Constrained completions of real models follow the schema, and equal those without a draft.

The temperature is 1.5 and the tiny models know no JSON, so only the constraint can make a completion right.
Q8_0 computes the same bits at every batch width, so the tokens must be equal.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import Partly, all_but_last, every_second
from llamaspec import (
    Completion,
    Constraint,
    FixedLength,
    ModelOptions,
    NoDrafter,
    Pair,
    Sampling,
    StopReason,
    TextStream,
    open_pair,
)
from llamaspec.values import Source
from tiny_models import Recipe, write_llama
from tiny_vocabulary import BYTES

CPU = ModelOptions(threads=1, gpu_layers=0)
HOT = Sampling(temperature=1.5)
PROMPT = "def settings():\n    return "
MAX_TOKENS = 160
NAMES = ("name", "self", "n", "é")
SOME = settings(max_examples=12)

LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        lambda low, n: {"type": "integer", "minimum": low, "maximum": low + n},
        st.integers(-1000, 1000), st.integers(0, 5000),
    ),
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 6)),
    st.just({"type": "string", "pattern": "^[a-c]{1,4}-[0-9]$"}),
    st.builds(
        lambda values: {"enum": values},
        st.lists(st.one_of(st.sampled_from(NAMES), st.integers(-5, 5), st.none()), min_size=1, max_size=3),
    ),
)  # fmt: skip


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _larger(schemas: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.one_of(
        st.builds(
            lambda items, n: {"type": "array", "items": items, "minItems": min(n, 1), "maxItems": n},
            schemas, st.integers(0, 3),
        ),
        st.dictionaries(st.sampled_from(NAMES), schemas, max_size=3).map(_object),
        st.lists(schemas, min_size=1, max_size=2).map(lambda some: {"anyOf": some}),
    )  # fmt: skip


SCHEMAS = st.recursive(LEAVES, _larger, max_leaves=4)


@pytest.fixture(scope="module")
def random_pair(target_file: Path, draft_file: Path) -> Iterator[Pair]:
    """Random weights, 288 tokens, n-gram drafts besides those of the draft model."""
    with open_pair(target_file, draft_file, ngram=True, target_options=CPU, draft_options=CPU) as pair:
        yield pair


def write(pair: Pair, constraint: Constraint | None, seed: int, **way: Any) -> Completion:
    pair.forget()
    way = {"sampling": HOT, "max_tokens": MAX_TOKENS, **way}
    return pair.stream(PROMPT, seed=seed, constraint=constraint, **way).run()


def check(completion: Completion, schema: dict[str, Any]) -> bool:
    """Return whether the text is complete; a complete text must be valid."""
    assert completion.stop_reason in (StopReason.END, StopReason.LIMIT)
    if completion.stop_reason is StopReason.LIMIT:
        return False
    jsonschema.validate(json.loads(completion.text), schema)
    return True


@SOME
@given(schema=SCHEMAS, seed=st.integers(0, 99))
def test_texts_of_random_models_are_valid(random_pair: Pair, schema: dict[str, Any], seed: int) -> None:
    compare(random_pair, schema, seed)


@SOME
@given(schema=SCHEMAS, seed=st.integers(0, 99))
def test_texts_of_the_embedded_pair_are_valid(demo: Pair, schema: dict[str, Any], seed: int) -> None:
    compare(demo, schema, seed)


def compare(pair: Pair, schema: dict[str, Any], seed: int) -> None:
    constraint = pair.json_schema(schema)
    plain = write(pair, constraint, seed, drafter=NoDrafter())
    check(plain, schema)
    drafted = write(pair, constraint, seed, policy=FixedLength(4))
    assert drafted.tokens == plain.tokens
    assert drafted.mask_seconds > 0.0
    assert drafted.stop_reason is plain.stop_reason
    part = Partly(4, (every_second, all_but_last)[seed % 2])
    assert write(pair, constraint, seed, policy=part).tokens == plain.tokens
    assert write(pair, constraint, seed).tokens == plain.tokens  # as many draft tokens as pay
    for rule in ("rejection", "block"):
        check(write(pair, constraint, seed, policy=FixedLength(4), rule=rule), schema)
    rule = ("rejection", "block")[seed % 2]
    check(write(pair, constraint, seed, policy=Partly(4, every_second), rule=rule), schema)


@SOME
@given(data=st.data(), schema=SCHEMAS)
def test_what_a_schema_allows_may_be_written(
    random_pair: Pair, data: st.DataObject, schema: dict[str, Any]
) -> None:
    """The constraint allows every valid instance, in the tokens of the tokenizer."""
    instance = data.draw(instances(schema))
    jsonschema.validate(instance, schema)
    row = random_pair.json_schema(schema).start_sequence()
    for layout in ({}, {"separators": (",", ":")}, {"indent": 2}):
        text = json.dumps(instance, ensure_ascii=False, **layout).encode()
        tokens = random_pair.target.vocabulary.tokenize(text, add_special=False)
        assert row.is_complete(tokens), text
        assert not row.is_complete(tokens[:-1]) or text[-1:].isdigit(), text


def instances(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Return the valid instances of a schema of the kinds above, with properties in its order."""
    if "anyOf" in schema:
        return st.one_of(*map(instances, schema["anyOf"]))
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kinds: dict[str, Callable[[], st.SearchStrategy[Any]]] = {
        "boolean": st.booleans,
        "null": st.none,
        "integer": lambda: st.integers(schema["minimum"], schema["maximum"]),
        "array": lambda: st.lists(
            instances(schema["items"]), min_size=schema["minItems"], max_size=schema["maxItems"]
        ),
        "object": lambda: st.fixed_dictionaries(
            {name: instances(some) for name, some in schema["properties"].items()}
        ).map(lambda made: {name: made[name] for name in schema["properties"]}),
        "string": lambda: (
            st.from_regex(schema["pattern"], fullmatch=True)
            if "pattern" in schema
            else st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=schema["maxLength"])
        ),
    }
    return kinds[schema["type"]]()


RECORD = _object(
    {
        "name": {"type": "string", "maxLength": 8},
        "numbers": {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": 3},
        "description": {"enum": ["the first of them", "the second of them"]},
    }
)  # fmt: skip


def test_forced_tokens_are_drafted_without_a_draft_model(target_file: Path) -> None:
    with open_pair(target_file, ngram=False, target_options=CPU) as pair:
        constraint = pair.json_schema(RECORD)
        plain = write(pair, constraint, 3, drafter=NoDrafter())
        assert check(plain, RECORD)
        drafted = write(pair, constraint, 3, policy=FixedLength(8))
    assert drafted.tokens == plain.tokens
    rounds = [round_ for round_ in drafted.rounds if len(round_.draft)]
    assert {round_.source for round_ in rounds} == {Source.GRAMMAR}
    assert all(round_.n_accepted == len(round_.draft) for round_ in rounds)
    assert drafted.summary.n_rounds < 0.8 * plain.summary.n_rounds


def test_rows_with_and_without_a_constraint_together(random_pair: Pair) -> None:
    """Each completion is the one of a sequence that runs alone."""
    schema, text = random_pair.json_schema(RECORD), random_pair.grammar('root ::= ("the " | "and ")+ "."')
    wanted = [
        (schema, 1),
        (None, 2),
        (text, 3),
        (schema, 4),
        (None, 5),
        (random_pair.json_schema({"type": "object"}), 6),
    ]
    alone = [write(random_pair, constraint, seed, policy=FixedLength(3)) for constraint, seed in wanted]
    random_pair.forget()
    settings: dict[str, Any] = {"sampling": HOT, "max_tokens": MAX_TOKENS, "policy": FixedLength(3)}
    streams = [
        random_pair.stream(PROMPT, seed=seed, constraint=constraint, **settings)
        for constraint, seed in wanted
    ]
    with ThreadPoolExecutor(len(streams)) as threads:
        found = [*threads.map(TextStream.run, streams)]
    assert [completion.tokens for completion in found] == [completion.tokens for completion in alone]
    assert max(round_.n_sequences for completion in found for round_ in completion.rounds) > 1


def test_a_constraint_ends_the_text_with_its_end(random_pair: Pair) -> None:
    for words in ('"yes" | "no"', '"a"'):
        completion = write(random_pair, random_pair.grammar(f"start: {words}"), 1)
        assert completion.text in ("yes", "no", "a")
        assert completion.stop_reason is StopReason.END


def test_where_nothing_can_follow_the_text_ends_and_says_so(random_pair: Pair) -> None:
    """No token spells the rest: half a special token, which no text can contain."""
    constraint = random_pair.grammar('start: "x" /[^\\s\\S]/')
    ways: list[dict[str, Any]] = [{"drafter": NoDrafter()}, {"policy": FixedLength(3)}, {}]
    for way in ways:
        completion = write(random_pair, constraint, 1, **way)
        assert completion.text == "x"
        assert completion.stop_reason is StopReason.CONSTRAINT


def test_a_grammar_may_spell_a_mark(tmp_path: Path) -> None:
    """To llguidance, a vocabulary's own <think> is no text: the completion ended before it."""
    recipe = Recipe(vocabulary=BYTES.marked("<think>"))
    with open_pair(write_llama(tmp_path / "model.gguf", recipe), target_options=CPU) as pair:
        done = pair.stream(
            PROMPT, constraint=pair.grammar('start: "a <think>x"'), max_tokens=20, seed=1
        ).run()
    assert (done.text, done.stop_reason) == ("a <think>x", StopReason.END)
