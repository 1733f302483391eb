"""A loaded embedding model or reranker, and what its endpoints share.

The texts of all requests share evaluations (`Embedder`). A client that leaves takes its texts along.
tests/serve/test_embeddings.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.requests import Request as HttpRequest

from llamaspec.embedder import Embedder, Request
from llamaspec.llama.embedding_model import EmbeddingModel
from llamaspec.serve import ServeSettings
from llamaspec.serve.http_errors import ContextOverflowError, bad_field
from llamaspec.serve.log import WORK
from llamaspec.serve.metrics import ModelMetrics
from llamaspec.serve.request_queue import RequestQueue, queue_full, server_stopping
from llamaspec.serve.service import while_connected
from llamaspec.values import Rows, TokenArray

N_TOGETHER = 16  # requests whose texts share evaluations


class EmbeddingService:
    """A loaded embedding model or reranker. Belongs to one asyncio event loop, except `close`."""

    def __init__(
        self,
        model_name: str,
        embedder: Embedder,
        queue: RequestQueue,
        metrics: ModelMetrics,
        settings: ServeSettings,
    ) -> None:
        self.model_name, self.embedder = model_name, embedder
        self._queue, self._metrics, self._settings = queue, metrics, settings
        self._threads = ThreadPoolExecutor(N_TOGETHER, thread_name_prefix="llamaspec-texts")
        self._n_requests = 0

    @property
    def target(self) -> EmbeddingModel:
        """The model."""
        return self.embedder.model

    async def rows(self, http: HttpRequest, texts: Sequence[TokenArray], field: str) -> Rows | None:
        """Return the vectors of texts, which came in a field: [n, size]; None if the client has left.

        RequestError: a text is empty or too long (400), too many requests wait (429), or the server is
        stopping (503).
        """
        for text in texts:
            if not len(text):
                raise bad_field(field, "must not contain an empty text")
            if len(text) > self.target.context_size:
                remedy = "shorten the text, or split it"
                raise ContextOverflowError(len(text), self.target.context_size, field, remedy=remedy)
        if self._queue.is_stopping:
            raise server_stopping()
        n_waiting = self._n_requests - N_TOGETHER
        if n_waiting >= self._settings.max_queue:
            self._metrics.refused()
            raise queue_full(n_waiting // N_TOGETHER)
        request = self.embedder.request(texts)
        n_tokens = sum(map(len, texts))
        http.scope[WORK] = lambda: _work(request, n_tokens)
        self._n_requests += 1
        try:
            rows = await while_connected(self._evaluated(request), http.receive)
        finally:
            self._n_requests -= 1
            request.is_cancelled = request.n_done < len(texts)
        if rows is not None:
            self._metrics.embedded(n_tokens)
        return rows

    async def _evaluated(self, request: Request) -> Rows:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self.embedder.run, request)

    def close(self) -> None:
        """End the threads; requests that wait get an error once the embedder is closed."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _work(request: Request, n_tokens: int) -> dict[str, Any]:
    """Return the figures for the log."""
    return {"texts": len(request.texts), "prompt_tokens": n_tokens, "cancelled": request.is_cancelled}
