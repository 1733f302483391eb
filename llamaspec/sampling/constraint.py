"""JSON schemas and grammars for completions, with llguidance.

A constraint is a pure function from the tokens generated so far to the tokens that may come next. Inside, a
matcher is rolled back to the tokens that a call has in common with the last one.
tests/sampling/test_constraint.py compares it with a fresh matcher.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from llamaspec.errors import ConstraintError, printable
from llamaspec.large_stack import with_large_stack
from llamaspec.protocols import WholeVocabulary, token_names
from llamaspec.sampling.schemas import compilable
from llamaspec.values import NO_TOKENS, TokenArray, n_common

MAX_TEXT = 64 << 10  # bytes of a schema or grammar
# One space, or a line break with indentation: with unlimited blanks a model might never end.
WHITESPACE = r"[ ]|\n[ ]{0,20}"
_KEPT = 24  # results that a sequence remembers, because a round asks twice for each draft token
_LARK = re.compile(r"(?m)^\s*(%llguidance\b|start\s*:(?!:=))")


class GrammarSequence:
    """The constraint of one sequence."""

    def __init__(self, matcher: LLMatcher, ends: TokenArray, size: int) -> None:
        self._fresh, self._matcher = matcher, matcher.deep_copy()
        self._ends, self._is_end = ends, frozenset(ends.tolist())
        self._size = size
        self._consumed = NO_TOKENS  # by the matcher
        self._mask, self._tokens = b"", NO_TOKENS  # the last mask of llguidance, and its tokens
        self._answers: OrderedDict[bytes, TokenArray] = OrderedDict()

    def allowed(self, generated: TokenArray) -> TokenArray:
        """Return the tokens that may come next: int32 [A], ascending; none after an end-of-text token."""
        key = generated.tobytes()
        if key not in self._answers:
            self._answers[key] = self._allowed(generated)
            if len(self._answers) > _KEPT:
                self._answers.popitem(last=False)
        return self._answers[key]

    def forced(self, generated: TokenArray) -> TokenArray:
        """Return the tokens that must come next, as far as they are known: int32 [F]."""
        if not self._go_to(generated):
            return NO_TOKENS
        return np.array(self._matcher.compute_ff_tokens(), dtype=np.int32)

    def is_complete(self, generated: TokenArray) -> bool:
        """Whether the completion may end here."""
        return self._go_to(generated) and self._matcher.is_accepting()

    def _allowed(self, generated: TokenArray) -> TokenArray:
        if not self._go_to(generated):
            return NO_TOKENS
        mask = self._matcher.compute_bitmask()
        if mask != self._mask:  # it stays the same within a JSON string
            bits = np.unpackbits(np.frombuffer(mask, np.uint8), count=self._size, bitorder="little")
            self._mask, self._tokens = mask, np.flatnonzero(bits).astype(np.int32)
        tokens = self._tokens
        # The completion ends if a limit of llguidance is reached, or no token fits the only continuation.
        return tokens if len(tokens) and not self._matcher.is_error() else self._ends

    def _go_to(self, generated: TokenArray) -> bool:
        """Make the matcher consume exactly these tokens; False if one is not allowed or ends the text."""
        n = n_common(self._consumed, generated)
        n_back = len(self._consumed) - n
        if self._matcher.is_error() or (n_back and not self._matcher.rollback(n_back)):
            self._matcher, n = self._fresh.deep_copy(), 0
        ordinary = list(takewhile(lambda token: token not in self._is_end, generated[n:].tolist()))
        n += self._matcher.try_consume_tokens(ordinary)
        self._consumed = generated[:n]
        return n == len(generated)


@dataclass(frozen=True, slots=True, eq=False)
class Grammar:
    """A compiled constraint for any number of sequences and threads, made by `Grammars`."""

    matcher: LLMatcher
    ends: TokenArray  # [E] the end-of-text tokens, ascending
    size: int  # V, the number of tokens

    def start_sequence(self) -> GrammarSequence:
        """Start a sequence."""
        return GrammarSequence(self.matcher, self.ends, self.size)


class Grammars:
    """Compiles constraints for a vocabulary.

    Raises
    ------
    ConstraintError
        The vocabulary has no end-of-text token, so no completion could end.
    """

    def __init__(self, vocabulary: WholeVocabulary) -> None:
        ends = list(vocabulary.ends)
        if not ends:
            raise ConstraintError(
                "the model has no end-of-text token, so it cannot end a completion; use another model"
            )
        self._ends, self._size = np.array(ends, dtype=np.int32), vocabulary.size
        self._tokenizer = LLTokenizer(_Tokens(vocabulary), n_vocab=self._size, eos_token=ends)  # type: ignore[arg-type]
        self._limits = LLParserLimits(verbose_errors=False, max_lexer_states=50_000)

    def json_schema(self, schema: Mapping[str, Any] | str) -> Grammar:
        """Compile a JSON schema; properties come in the schema's order."""
        return self._compiled("JSON schema", _schema_source(schema))

    def grammar(self, text: str) -> Grammar:
        """Compile a grammar in llguidance's Lark or llama.cpp's GBNF.

        Lark has a rule `start` or begins with `%llguidance`; GBNF has a rule `root`.
        """
        return self._compiled("grammar", _grammar_source(text))

    def _compiled(self, kind: str, source: str) -> Grammar:
        matcher = with_large_stack(
            lambda: LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        )
        grammar = Grammar(matcher, self._ends, self._size)
        if matcher.is_error():
            raise _unusable(kind, matcher.get_error())
        sequence = grammar.start_sequence()
        only_ends = np.isin(sequence.allowed(NO_TOKENS), self._ends).all()
        if only_ends and not sequence.is_complete(NO_TOKENS):
            raise ConstraintError(f"the {kind} allows no text that the model can write; relax it")
        return grammar


def check_json_schema(schema: str) -> None:
    """Raise a ConstraintError if a JSON schema is invalid; this needs no model."""
    _check("JSON schema", _schema_source(schema))


def check_grammar(text: str) -> None:
    """Raise a ConstraintError if a grammar is invalid; this needs no model."""
    _check("grammar", _grammar_source(text))


def _check(kind: str, source: str) -> None:
    if fault := with_large_stack(lambda: LLMatcher.validate_grammar(source)):
        raise _unusable(kind, fault)


def _schema_source(schema: Mapping[str, Any] | str) -> str:
    """Return a JSON schema in the form of llguidance."""
    try:
        return LLMatcher.grammar_from_json_schema(_json(schema), defaults={"whitespace_pattern": WHITESPACE})
    except ValueError as error:
        raise _unusable("JSON schema", str(error)) from error


def _grammar_source(text: str) -> str:
    """Return a grammar in the form of llguidance."""
    _check_size("grammar", text)
    if not _LARK.search(text):
        try:
            text = gbnf_to_lark(text)
        except Exception as error:
            reason = _first_line(str(error) or type(error).__name__)
            raise ConstraintError(
                f"the grammar is neither Lark (there is no rule start) nor GBNF: {reason}; correct it"
            ) from error
    return LLMatcher.grammar_from_lark(text)


def _json(schema: Mapping[str, Any] | str) -> str:
    """Return a schema as JSON text, as llguidance can compile it; raise if it is not a JSON object."""
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False)
        _check_size("JSON schema", text)
        parsed = compilable(json.loads(text))
    except RecursionError as error:
        raise ConstraintError("the JSON schema is nested too deeply; flatten it") from error
    except (TypeError, ValueError) as error:
        reason = _first_line(str(error))
        raise ConstraintError(f"the JSON schema is not JSON: {reason}; correct it") from error
    if not isinstance(parsed, dict):
        raise ConstraintError(f"a JSON schema must be a JSON object, got {_first_line(text)}")
    return json.dumps(parsed)


def _check_size(kind: str, text: str) -> None:
    n = len(text.encode("utf-8", errors="surrogatepass"))
    if n > MAX_TEXT:
        raise ConstraintError(f"the {kind} has {n} bytes, but at most {MAX_TEXT} are allowed; shorten it")
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise ConstraintError(
            f"the {kind} is not valid text: it contains half of a surrogate pair; remove it"
        )


def _unusable(kind: str, message: str) -> ConstraintError:
    return ConstraintError(f"the {kind} cannot be used: {_first_line(message)}; correct it")


def _first_line(message: str) -> str:
    """Return the first line of a message, shortened and safe for a terminal."""
    first = printable(message.strip().partition("\n")[0])
    return first if len(first) <= 200 else first[:200] + "…"


class _Tokens:
    """A vocabulary for llguidance, which defines the names of the attributes."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: WholeVocabulary) -> None:
        self._vocabulary = vocabulary
        self._specials = specials = vocabulary.specials
        self.tokens = token_names(vocabulary)
        self.special_token_ids = sorted(specials)
        self.eos_token_id = vocabulary.ends[0] if vocabulary.ends else 0

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokenize a part of a text as the model would in the middle of a text.

        Some vocabularies put a space before every text; then a line break before the part keeps it away.
        llguidance wants ordinary tokens for text, so a spelled-out special token is split into them.
        """
        wanted = text.encode() if isinstance(text, str) else text
        for before in (b"", b"\n"):
            tokens = self._split(before + wanted)
            lengths = [len(self._vocabulary.piece(token)) for token in tokens]
            n_missing, n = sum(lengths) - len(wanted), 0
            while n_missing > 0 and n < len(tokens):
                n_missing -= lengths[n]
                n += 1
            if n_missing == 0:
                return tokens[n:]
        return []

    def _split(self, text: bytes) -> list[int]:
        """Tokenize a text into ordinary tokens."""
        found: list[int] = []
        for token in self._vocabulary.tokenize(text, add_special=False).tolist():
            piece = self._vocabulary.piece(token)
            is_mark = token in self._specials and len(piece) > 1
            found += [*self._split(piece[:1]), *self._split(piece[1:])] if is_mark else [token]
        return found
