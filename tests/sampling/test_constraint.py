"""Constraints are pure functions of the tokens; invalid and hostile ones give a one-line error."""

from __future__ import annotations

import contextlib
import json
import random
import re
import threading
from collections.abc import Callable, Iterator
from time import process_time
from typing import Any

import jsonschema
import numpy as np
import pytest

from fakes import tokens
from llamaspec import LlamaModel, ModelOptions
from llamaspec.errors import ConstraintError
from llamaspec.llama.vocabulary import LlamaVocabulary
from llamaspec.sampling.constraint import MAX_TEXT, Grammar, Grammars
from llamaspec.sampling.schemas import compilable
from llamaspec.values import NO_TOKENS, TokenArray
from model_store import ModelStore
from tiny_models import Recipe
from tiny_vocabulary import BYTES, Vocabulary, sentencepiece_vocabulary

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "the and": {"type": "array", "items": {"type": "integer"}},
        "kind": {"enum": ["one", "once", "the only"]},
    },
    "required": ["name", "the and", "kind"],
    "additionalProperties": False,
}
MAKE: dict[str, Callable[[Grammars], Grammar]] = {
    "any object": lambda g: g.json_schema('{"type": "object"}'),
    "schema": lambda g: g.json_schema(PERSON),
    "Lark": lambda g: g.grammar('start: "a"* ("then" | "the")'),
    "GBNF": lambda g: g.grammar('root ::= "the " [a-z]+ (", " [0-9]+)* "."'),
    "Lark with a special token": lambda g: g.grammar("start: /(.|\\n)*/ <s> /[0-9]+/"),
}


@pytest.fixture(scope="module", params=[BYTES, sentencepiece_vocabulary()], ids=["bytes", "pieces"])
def vocabulary(request: pytest.FixtureRequest, store: ModelStore) -> Iterator[LlamaVocabulary]:
    yield from opened_vocabulary(store, request.param)


@pytest.fixture(scope="module")
def byte_level(store: ModelStore) -> Iterator[LlamaVocabulary]:
    yield from opened_vocabulary(store, BYTES)


def opened_vocabulary(store: ModelStore, kind: Vocabulary) -> Iterator[LlamaVocabulary]:
    path = store.path("llama", Recipe(dtype="q8_0", vocabulary=kind))
    with LlamaModel(path, ModelOptions(threads=1)) as model:
        yield model.vocabulary


@pytest.fixture
def grammars(vocabulary: LlamaVocabulary) -> Grammars:
    return Grammars(vocabulary)


def spelled(vocabulary: LlamaVocabulary, text: bytes) -> TokenArray:
    """Return one token for each byte of a text: any split is allowed if no token is forced."""
    found = {vocabulary.piece(token): token for token in range(vocabulary.size)}
    return tokens(*(found[bytes([byte])] for byte in text))


def accepts(grammar: Grammar, vocabulary: LlamaVocabulary, text: str) -> bool:
    """Whether a grammar accepts a text as the model tokenizes it."""
    ids = vocabulary.tokenize(b"\n" + text.encode(), add_special=False)
    while b"".join(vocabulary.piece(token) for token in ids.tolist()) != text.encode():
        ids = ids[1:]
    return grammar.start_sequence().is_complete(ids)


A, B = {"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"type": "integer"}}}
LEAF = {"properties": {"next": {"$ref": "#/$defs/leaf"}, "a": {"type": "integer"}}}
FIRST = {"type": "object", "properties": {"kind": {"const": "x"}, **A["properties"]}, "required": ["kind"]}
SECOND = {"type": "object", "properties": {"kind": {"const": "y"}}, "required": ["kind"]}
EITHER = {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}
AT_A = {"$ref": "#/$defs/x"}
# Schemas, what they allow, and what they allow only if invented keys are allowed.
CLOSED: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (A, ["{}", '{"a":1}'], ['{"c":1}', '{"a":1,"c":1}']),
    ({**A, "additionalProperties": True}, ['{"a":1,"c":1}'], []),
    ({**A, "additionalProperties": {"type": "null"}}, ['{"a":1,"c":null}'], []),
    ({**A, "patternProperties": {"^x": {"type": "null"}}}, ['{"x1":null}'], ['{"c":1}']),
    ({"type": "object"}, ['{"c":{"d":1}}'], []),
    ({"type": "object", "properties": {}}, ["{}"], ['{"c":1}']),
    ({**A, "required": ["a", "b"]}, ['{"a":1,"b":[2]}'], ['{"a":1,"b":2,"c":3}']),
    ({"type": ["object", "null"], **A}, ["null", '{"a":1}'], ['{"c":1}']),
    ({"properties": {"o": A, "l": {"items": A}}}, ['{"o":{"a":1},"l":[{"a":1}]}'],
     ['{"o":{"c":1}}', '{"l":[{"c":1}]}']),
    ({"anyOf": [A, B]}, ['{"a":1}', '{"b":1}'], ['{"c":1}']),
    ({"oneOf": [FIRST, SECOND]}, ['{"kind":"x","a":1}', '{"kind":"y"}'], ['{"kind":"y","a":1}']),
    ({**EITHER, "properties": A["properties"]}, ['{"a":1}', '{"b":1}', '{"a":1,"b":1}'], ['{"a":1,"c":1}']),
    ({"allOf": [A, B]}, ['{"a":1,"b":2}', '{"b":1}'], ['{"a":1,"c":1}']),
    ({"allOf": [A]}, ['{"a":1}'], ['{"c":1}']),
    ({**A, "allOf": [{**B, "required": ["b"]}]}, ['{"a":1,"b":2}'], ['{"a":1,"b":2,"c":1}']),
    ({"allOf": [A, {"additionalProperties": {"type": "integer"}}]}, ['{"a":1,"c":2}'], []),
    ({**AT_A, "$defs": {"x": A}}, ['{"a":1}'], ['{"c":1}']),
    ({"$defs": {"x": A}, "allOf": [AT_A, B], "properties": {"o": AT_A}}, ['{"a":1,"b":2,"o":{"a":1}}'],
     ['{"c":1}', '{"o":{"b":1}}']),
    ({"$defs": {"x": {"allOf": [{"$ref": "#/$defs/y"}]}, "y": A}, "allOf": [AT_A, B]}, ['{"a":1,"b":2}'],
     ['{"c":1}']),
    ({"$defs": {"leaf": LEAF}, "$ref": "#/$defs/leaf"}, ['{"next":{"next":{"a":1}}}'], ['{"next":{"c":1}}']),
    ({"$defs": {"leaf": LEAF}, "allOf": [{"$ref": "#/$defs/leaf"}, B]}, ['{"next":{"a":1},"b":1}'],
     ['{"next":{"b":1}}', '{"c":1}']),
    ({"properties": {"in": {"$ref": "#"}, "a": {"type": "null"}}}, ['{"in":{"in":{"a":null}}}'],
     ['{"in":{"c":1}}']),
    ({"definitions": {"a/b": A}, "items": {"$ref": "#/definitions/a~1b"}}, ['[{"a":1}]'], ['[{"c":1}]']),
    ({"properties": {"const": {"const": {"properties": {}}}, "properties": A}},
     ['{"const":{"properties":{}},"properties":{"a":1}}'], ['{"properties":{"c":1}}']),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "more"), CLOSED, ids=range(len(CLOSED)))
def test_objects_have_only_named_properties(
    byte_level: LlamaVocabulary, schema: dict[str, Any], good: list[str], more: list[str]
) -> None:
    """Once, small models invented keys until the limit. The schema itself allows all of these texts."""
    grammar = Grammars(byte_level).json_schema({**schema, "x-guidance": {"whitespace_flexible": False}})
    for text in good + more:
        jsonschema.validate(json.loads(text), schema)
        assert accepts(grammar, byte_level, text) is (text in good), text


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": 5, **A},
        {"allOf": {"a": 1}},
        {"properties": [1], "anyOf": [A]},
        {"properties": {"a": 1}, "required": [2], "allOf": [5, None]},
        {"$defs": 5, "allOf": [{"$ref": "#/items"}, {"$ref": "#/no"}, {"$ref": 5}], "items": A},
        {"allOf": [{"$ref": "#/anyOf/7"}, {"$ref": "other.json"}], "anyOf": []},
    ],
)
def test_malformed_schemas_are_not_our_fault(byte_level: LlamaVocabulary, schema: dict[str, Any]) -> None:
    assert isinstance(compilable(schema), dict)
    with contextlib.suppress(ConstraintError):
        Grammars(byte_level).json_schema(schema)


def test_many_references_take_no_time() -> None:
    """A chain of compositions, which all want the names of the rest."""
    n = 4_000
    chain = {str(i): {"allOf": [{"$ref": f"#/$defs/{i + 1}"}, A]} for i in range(n)}
    begin = process_time()
    compilable({"$defs": {**chain, str(n): A}, "$ref": "#/$defs/0"})
    assert process_time() - begin < 2


@pytest.mark.parametrize("kind", list(MAKE))
def test_the_allowed_tokens_depend_only_on_the_generated_tokens(
    kind: str, grammars: Grammars, vocabulary: LlamaVocabulary
) -> None:
    """A sequence gives the same answers after many calls as a fresh one."""
    rng, grammar = random.Random(kind), MAKE[kind](grammars)
    row, path, n_ends = grammar.start_sequence(), list[int](), 0
    for _ in range(1200):
        generated = tokens(*path)
        answer, fresh = row.allowed(generated), grammar.start_sequence()
        assert answer.tolist() == fresh.allowed(generated).tolist()
        assert row.forced(generated).tolist() == fresh.forced(generated).tolist()
        assert row.is_complete(generated) == grammar.start_sequence().is_complete(generated)
        if forced := row.forced(generated).tolist():
            assert answer.tolist() == forced[:1]
        if row.is_complete(generated):
            n_ends += 1
            assert any(map(vocabulary.is_end, answer.tolist()))
        if not len(answer) or len(path) > 60 or rng.random() < 0.1:
            path = path[: rng.randrange(len(path) + 1)]
        elif rng.random() < 0.05:
            path.append(rng.randrange(vocabulary.size))  # rarely allowed
        else:
            path.append(rng.choice(answer.tolist()))
    assert n_ends or kind in ("schema", "GBNF")


def test_nothing_follows_an_end_token_or_a_forbidden_token(
    grammars: Grammars, vocabulary: LlamaVocabulary
) -> None:
    row = grammars.grammar('start: "ab"').start_sequence()
    complete = spelled(vocabulary, b"ab")
    assert [vocabulary.is_end(token) for token in row.allowed(complete).tolist()] == [True]
    assert row.allowed(np.append(complete, np.int32(vocabulary.eos))).tolist() == []
    assert row.allowed(spelled(vocabulary, b"ba")).tolist() == []
    assert not row.is_complete(spelled(vocabulary, b"a"))
    assert not row.is_complete(spelled(vocabulary, b"ba"))
    assert row.is_complete(complete)


def test_special_tokens_are_allowed_only_by_name(grammars: Grammars, vocabulary: LlamaVocabulary) -> None:
    anything = grammars.grammar("start: /(.|\\n)*/").start_sequence()
    assert not {*vocabulary.specials} - {vocabulary.eos} & {*anything.allowed(NO_TOKENS).tolist()}
    assert anything.is_complete(spelled(vocabulary, b"<s>"))  # as text, not as the token
    named = grammars.grammar('start: <s> "a"').start_sequence()
    assert named.allowed(NO_TOKENS).tolist() == [vocabulary.bos]


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ('{"name": "x", "the and": [1, 2], "kind": "once"}', True),
        ('{"name":"x","the and":[],"kind":"one"}', True),
        ('{\n  "name": "x",\n  "the and": [\n    1\n  ],\n  "kind": "the only"\n}', True),
        ('{"the and": [], "name": "x", "kind": "one"}', False),  # not in the schema's order
        ('{"name": "x", "the and": ["1"], "kind": "one"}', False),
        ('{"name": "x", "the and": [], "kind": "two"}', False),
        ('{"name": "x", "the and": []}', False),
        ('{  "name": "x", "the and": [], "kind": "one"}', False),  # the number of blanks is limited
    ],
)
def test_json(text: str, is_right: bool, grammars: Grammars, vocabulary: LlamaVocabulary) -> None:
    for schema in (PERSON, json.dumps(PERSON)):
        assert accepts(grammars.json_schema(schema), vocabulary, text) is is_right


GBNF = r"""
# the arithmetic example of llama.cpp, and more of its syntax
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]{0,3} ws
num   ::= [0-9]+ ws
ws    ::= [ \t]*
"""


@pytest.mark.parametrize(("text", "is_right"), [("a +2=b\n", True), ("(a)*b=3 \nx=y\n", True), ("a=", False)])
def test_gbnf(text: str, is_right: bool, grammars: Grammars, vocabulary: LlamaVocabulary) -> None:
    assert accepts(grammars.grammar(GBNF), vocabulary, text) is is_right


def chain(n: int) -> str:
    """Return a chain of rules; the usual stack has room for 3,000."""
    return "start: a0\n" + "".join(f"a{i}:a{i + 1}\n" for i in range(n)) + f'a{n}: "x"'


def references(n: int) -> str:
    definitions = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(n)}
    return json.dumps({"$defs": {**definitions, f"a{n}": {"type": "integer"}}, "$ref": "#/$defs/a0"})


def test_long_chains_do_not_overflow_the_stack(byte_level: LlamaVocabulary) -> None:
    grammars = Grammars(byte_level)
    assert accepts(grammars.grammar(chain(4500)), byte_level, "x")
    assert accepts(grammars.json_schema(references(1700)), byte_level, "12")


CIRCLE: dict[str, object] = {}
CIRCLE["items"] = CIRCLE
BAD_SCHEMAS: dict[str, tuple[Any, str]] = {
    "a circle": (CIRCLE, "is not JSON"),
    "a set": ({"const": {1, 2}}, "is not JSON"),
    "not JSON": ("{", "is not JSON"),
    "a list": ("[1]", "must be a JSON object"),
    "unknown type": ('{"type": "foo"}', "Invalid type: foo"),
    "unknown keyword": ('{"type": "object", "unevaluatedProperties": false}', "unevaluatedProperties"),
    "contradiction": ('{"type": "integer", "minimum": 5, "maximum": 3}', "minimum"),
    "another file": ('{"$ref": "http://example.com/x"}', "does not fetch"),
    "itself": ('{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}', "the JSON schema"),
    "too large": ('{"title": "' + "x" * MAX_TEXT + '"}', "shorten it"),
    "too deep": ('{"items":' * 5000 + "{}" + "}" * 5000, "the JSON schema"),
    "too deep for Python": ('{"items":' * 7000 + "{}", "the JSON schema"),
    "too many ways": (
        json.dumps({"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(9)]} for i in range(9)]}),
        "the JSON schema",
    ),
    "half a character": ('{"title": "\ud800"}', "surrogate"),
}
BAD_GRAMMARS = {
    "an open string": ('start: "a', "lexer error"),
    "an unknown rule": ("start: foo", "foo"),
    "neither": ("hello", "neither Lark"),
    "empty": ("", "neither Lark"),
    "GBNF without its root": ('foo ::= "a"', "root"),
    "deep brackets": ("start: " + "(" * 30000, "the grammar"),
    "deep brackets in GBNF": ("root ::= " + "(" * 30000, "neither Lark"),
    "deep regular expression": ("start: /" + "(" * 20000 + "a" + ")" * 20000 + "/", "the grammar"),
    "too large": ("start: " + '"a" ' * MAX_TEXT, "shorten it"),
    "nothing is allowed": ("start: /[^\\s\\S]/", "the grammar"),
    "half a character": ('start: "\ud800"', "surrogate"),
    "an unknown special token": ("start: <|nothing|>", "the grammar"),
}


@pytest.mark.parametrize(
    ("kind", "given", "says"),
    [
        *(pytest.param("json_schema", *case, id=name) for name, case in BAD_SCHEMAS.items()),
        *(pytest.param("grammar", *case, id=name) for name, case in BAD_GRAMMARS.items()),
    ],
)
def test_bad_schemas_and_grammars(kind: str, given: Any, says: str, byte_level: LlamaVocabulary) -> None:
    with pytest.raises(ConstraintError, match=re.escape(says)) as caught:
        getattr(Grammars(byte_level), kind)(given)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 400


def test_one_constraint_in_several_threads(byte_level: LlamaVocabulary) -> None:
    grammars = Grammars(byte_level)
    grammar = grammars.json_schema(PERSON)
    wrong: list[object] = []

    def walk(seed: int) -> None:
        rng, row, path = random.Random(seed), grammar.start_sequence(), list[int]()
        for _ in range(150):
            answer = row.allowed(tokens(*path)).tolist()
            if answer != grammar.start_sequence().allowed(tokens(*path)).tolist():
                wrong.append(path)
            if not answer:
                path = []
            else:
                path.append(rng.choice(answer))
        grammars.json_schema({"type": "object"})

    threads = [threading.Thread(target=walk, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


DIGITS = "9" * 18
INTEGER = {"type": "integer"}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (INTEGER, ["0", "-7", DIGITS, f"-{DIGITS}", str(2**63 - 1)], [f"{DIGITS}99", f"-{DIGITS}99"]),
        ({"type": ["integer", "null"]}, ["null", DIGITS], [f"{DIGITS}99"]),
        (INTEGER | {"minimum": 5}, ["5", DIGITS], ["4", f"{DIGITS}99"]),
        (INTEGER | {"exclusiveMaximum": 5}, ["4", f"-{DIGITS}"], ["5", f"-{DIGITS}99"]),
        (INTEGER | {"minimum": 10**18}, [str(2 * 10**18)], ["5"]),
        (INTEGER | {"multipleOf": 10}, ["70", f"{DIGITS[:-1]}0"], ["7", f"{DIGITS}90"]),
        ({"type": "array", "items": INTEGER}, ["[1]"], [f"[{DIGITS}99]"]),
        ({"type": "object", "properties": {"type": INTEGER}, "required": ["type"]},
         ['{"type":1}'], [f'{{"type":{DIGITS}99}}']),
        ({"anyOf": [INTEGER, {"type": "string"}]}, [f'"{DIGITS}99"'], [f"{DIGITS}99"]),
        ({"$ref": "#/$defs/n", "$defs": {"n": INTEGER}}, ["1"], [f"{DIGITS}99"]),
        ({"enum": [10**25]}, [str(10**25)], [DIGITS]),
        ({"const": {"type": "integer"}}, ['{"type":"integer"}'], []),
        (INTEGER | {"minimum": 2**53 + 1}, [str(2**53 + 2)], [str(2**53)]),
        (INTEGER | {"maximum": -(2**53) - 1}, [str(-(2**53) - 2)], [str(-(2**53))]),
        (INTEGER | {"exclusiveMinimum": 2**53}, [str(2**53 + 2)], [str(2**53)]),
        (INTEGER | {"exclusiveMaximum": 2**53 + 1, "maximum": 2**54}, [str(2**53)], [str(2**53 + 1)]),
        (INTEGER | {"minimum": -(2**63), "maximum": 2**64 - 1}, ["0", str(2**63 - 1)], [str(2**63)]),
        ({"type": "number", "maximum": 2**53 + 1}, [str(2**53)], [str(2**53 + 2)]),
    ],
)  # fmt: skip
def test_an_integer_ends(
    byte_level: LlamaVocabulary, schema: Any, right: list[str], wrong: list[str]
) -> None:
    """At temperature 0, a model wrote zeros up to the limit."""
    grammar = Grammars(byte_level).json_schema(schema)
    for text in right:
        assert accepts(grammar, byte_level, text), text
    for text in wrong:
        assert not accepts(grammar, byte_level, text), text


@pytest.mark.parametrize(
    "schema", [{"enum": [1, 2**53 + 1]}, {"const": {"a": [-(2**53) - 1]}}, {"const": 10**400}]
)
def test_integers_that_would_change_are_refused(byte_level: LlamaVocabulary, schema: Any) -> None:
    """llguidance reads them as floating-point numbers, so another number was enforced."""
    with pytest.raises(ConstraintError, match=r"beyond 2\^53"):
        Grammars(byte_level).json_schema(schema)
