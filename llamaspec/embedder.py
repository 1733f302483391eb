"""Vectors of texts, and scores of documents for a query: the object that programs, commands and server use.

Several threads may ask at the same time. Their texts share evaluations: each takes texts of all requests in
turn. One compute thread serves all models of a process. tests/test_embedder.py.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from llamaspec.catalog import resolve_model
from llamaspec.chat.template import Escaper, Rendered, SpecialTokens
from llamaspec.engine.scheduler import Scheduler
from llamaspec.engine.thread import ComputeThread
from llamaspec.errors import ClosedError, PromptError
from llamaspec.llama.embedding_model import EmbeddingModel
from llamaspec.llama.options import ModelOptions
from llamaspec.llama.weights import LoadProgress
from llamaspec.values import NO_TOKENS, Rows, TokenArray

RANK_TEMPLATE = "tokenizer.chat_template.rerank"  # metadata of some rerankers
_PLACES = re.compile(r"\{(query|document)\}")

Text = str | Sequence[int] | TokenArray


@dataclass(slots=True, eq=False)
class Request:
    """Texts that are evaluated in any order, together with those of other requests."""

    texts: Sequence[TokenArray]
    rows: Rows  # [n, size]: their vectors
    n_begun: int = 0  # texts
    n_done: int = 0
    is_cancelled: bool = False
    error: Exception | None = field(default=None)

    @property
    def is_over(self) -> bool:
        """Whether all is known, or nobody waits any more."""
        return self.n_done == len(self.texts) or self.is_cancelled or self.error is not None


class Embedder:
    """An open embedding model or reranker. Close it, or use it as a context manager."""

    def __init__(self, model: EmbeddingModel) -> None:
        self.model = model
        self._waiting: deque[Request] = deque()
        self._thread = ComputeThread(Scheduler({}))
        self._is_closed = False
        self._known = SpecialTokens(model.vocabulary.controls)
        self._template = model.weights.metadata(RANK_TEMPLATE)

    def embed(self, texts: Sequence[Text], *, dimensions: int | None = None) -> Rows:
        """Return the vectors of texts, each of length 1: float32 [n, E].

        Parameters
        ----------
        texts : sequence of str or of [n] int
            Texts, or their token ids. Prefixes that a model was trained with are the caller's.
        dimensions : int, optional
            Only the first numbers of each vector, for models that were trained for that (Matryoshka).

        Raises
        ------
        PromptError
            A text is empty, not UTF-8, or longer than the model's context.
        ValueError
            The model is a reranker, or has no vectors of this length.
        """
        if self.model.ranks:
            raise ValueError("a reranker makes no vectors; use rank")
        rows = self.run(self.request([self.tokens(text) for text in texts]))
        return unit_vectors(rows, dimensions)

    def rank(self, query: str, documents: Sequence[str]) -> npt.NDArray[np.float32]:
        """Return how well documents answer a query, greater is better: float32 [n].

        Raises
        ------
        PromptError
            The query and a document are longer than the model's context.
        ValueError
            The model is no reranker.
        """
        if not self.model.ranks:
            raise ValueError("only a reranker scores documents; use embed")
        return self.run(self.request([self.pair_tokens(query, each) for each in documents]))[:, 0]

    def tokens(self, text: Text) -> TokenArray:
        """Return the tokens of a text, with those that the model wants at its ends: int32 [n]."""
        if isinstance(text, str):
            return self.model.vocabulary.tokenize(_utf8(text))
        return np.asarray(text if len(text) else NO_TOKENS, dtype=np.int32)

    def pair_tokens(self, query: str, document: str) -> TokenArray:
        """Return the tokens of a query and a document, as llama-server joins them: int32 [n].

        Text of either never becomes a control token.
        """
        vocabulary = self.model.vocabulary
        if self._template is not None:
            given = {"query": query, "document": document}
            escaper = Escaper(self._known, [self._template, query, document])
            escaped = _PLACES.sub(lambda found: escaper.escape(given[found[1]]), self._template)
            return Rendered.of(escaped, self._known, escaper).tokenize(vocabulary)
        first, second = (vocabulary.tokenize(_utf8(text), add_special=False) for text in (query, document))
        eos = [vocabulary.eos if vocabulary.eos >= 0 else vocabulary.sep] if vocabulary.adds_eos else []
        bos, sep = ([token] if is_added else [] for token, is_added in (
            (vocabulary.bos, vocabulary.adds_bos), (vocabulary.sep, vocabulary.adds_sep)))  # fmt: skip
        return np.concatenate([bos, first, eos, sep, second, eos]).astype(np.int32)

    def check(self, texts: Sequence[TokenArray]) -> None:
        """Raise PromptError if a text cannot be evaluated."""
        longest, size = self.model.context_size, self.model.vocabulary_size
        for i, text in enumerate(texts):
            if not len(text):
                raise PromptError(f"text {i} is empty; leave it out")
            if len(text) > longest:
                raise PromptError(f"text {i} has {len(text)} tokens, but the context {longest}; shorten it")
            if not 0 <= text.min() <= text.max() < size:
                raise PromptError(f"token ids must be from 0 to {size - 1}")

    def request(self, texts: Sequence[TokenArray]) -> Request:
        """Return a request for `run`; PromptError if a text cannot be evaluated."""
        self.check(texts)
        return Request(texts, np.empty((len(texts), self.model.size), dtype=np.float32))

    def run(self, request: Request) -> Rows:
        """Evaluate the texts of a request, beside those of others; return their vectors: [n, size].

        Raises ClosedError if it was cancelled or the model is closed, and the error of an evaluation.
        """
        self._waiting.append(request)
        try:
            while not request.is_over:
                if self._is_closed:
                    raise ClosedError("the model is closed")
                self._thread.call(self._step)
        finally:
            request.is_cancelled = request.n_done < len(request.texts)
        if request.error is not None:
            raise request.error
        if request.is_cancelled:
            raise ClosedError("the request was cancelled")
        return request.rows

    def _step(self) -> None:
        """Evaluate some texts of the requests that wait. Called on the compute thread."""
        found = self._next_texts()
        if not found:
            return
        try:
            rows = self.model.evaluate([request.texts[i] for request, i in found])
        except Exception as error:  # noqa: BLE001  # raised to those who wait
            for request, _ in found:
                request.error = error
            return
        for (request, i), row in zip(found, rows, strict=True):
            request.rows[i] = row
            request.n_done += 1

    def _next_texts(self) -> list[tuple[Request, int]]:
        """Return texts to evaluate together, with their requests: one of each, then again one of each."""
        found: list[tuple[Request, int]] = []
        while self._waiting:
            request = self._waiting[0]
            i = request.n_begun
            if i == len(request.texts) or request.is_over:
                self._waiting.popleft()
                continue
            lengths = [len(each.texts[j]) for each, j in (*found, (request, i))]
            if self.model.n_fitting(lengths) < len(lengths):
                break
            found.append((request, i))
            request.n_begun += 1
            self._waiting.rotate(-1)
        return found

    def close(self) -> None:
        """Refuse what waits, and free the model; may be called twice, and from any thread."""
        self._is_closed = True
        self.model.abort()
        self._thread.close()
        self.model.close()

    def __enter__(self) -> Embedder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_embedder(
    model: str | Path, *, options: ModelOptions | None = None, on_load: LoadProgress | None = None
) -> Embedder:
    """Load an embedding model or a reranker.

    Parameters
    ----------
    model : str or Path
        A file, a name from the list of models, or hf:owner/repo:file.

    Raises
    ------
    ModelFileError, MemoryFullError
        The model cannot be found or loaded.

    Examples
    --------
    >>> with open_embedder("nomic-embed-text.gguf") as embedder:  # doctest: +SKIP
    ...     vectors = embedder.embed(["search_query: What is TSNE?", "search_document: TSNE is ..."])
    >>> vectors[0] @ vectors[1]  # doctest: +SKIP
    """
    return Embedder(EmbeddingModel(resolve_model(model), options, on_load))


def unit_vectors(rows: Rows, dimensions: int | None = None) -> Rows:
    """Return vectors of length 1 in the same directions: [n, E], or of their first `dimensions` numbers.

    ValueError if they have fewer.

    Examples
    --------
    >>> unit_vectors(np.array([[3, 4, 12]], dtype=np.float32), 2).tolist()
    [[0.6000000238418579, 0.800000011920929]]
    """
    if dimensions is not None and not 1 <= dimensions <= rows.shape[1]:
        raise ValueError(f"dimensions must be from 1 to {rows.shape[1]}, got {dimensions}")
    rows = rows[:, :dimensions]
    lengths = np.sqrt(np.square(rows, dtype=np.float64).sum(axis=1, keepdims=True))
    unit: Rows = (rows / np.maximum(lengths, np.finfo(np.float64).tiny)).astype(np.float32)
    return unit


def _utf8(text: str) -> bytes:
    """Return a text in UTF-8; PromptError for halves of surrogate pairs."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"a text is not UTF-8: {error.reason}; remove such text") from error
