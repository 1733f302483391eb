"""What the page shows: which text was drafted, each evaluation, the rows and their draft tokens."""

from __future__ import annotations

import pytest

from llamaspec import Pair
from llamaspec.chat.answer_stream import AnswerPart
from llamaspec.chat.parse import ContentDelta, ReasoningDelta
from llamaspec.engine.detokenize import Span
from llamaspec.engine.events import Piece
from llamaspec.serve.deltas import Content, DeltaBuilder
from serving import Gate, Served, served, until

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "def f(x):"}], "max_tokens": 40, "seed": 1}


def test_spans_are_the_text(server: Served) -> None:
    events = server.events(CHAT, {**BODY, "speculative": {"spans": True}})
    chunks = [data for _, data in events[:-1]]
    for chunk in chunks:
        content = chunk["choices"][0]["delta"].get("content", "")
        assert "".join(span["text"] for span in chunk.get("spans", [])) == content
    spans = [span for chunk in chunks for span in chunk.get("spans", [])]
    assert {span["drafted"] for span in spans} == {True, False}
    alone = server.events(CHAT, {**BODY, "speculative": {"spans": True, "enabled": False}})
    spans = [span for _, data in alone[:-1] for span in data.get("spans", [])]
    assert {span["drafted"] for span in spans} == {False}
    assert not any("spans" in data for _, data in server.events(CHAT, BODY)[:-1])


def test_rounds_add_up(server: Served) -> None:
    body = {**BODY, "speculative": {"rounds": True}}
    chunk = server.events(CHAT, body)[-2][1]
    for answer in (server.post(CHAT, body).json(), chunk):
        timings, rounds = answer["timings"], answer["rounds"]
        assert len(rounds) == timings["rounds"]
        for total, part in (("draft_n", "drafted"), ("draft_n_accepted", "accepted")):
            assert timings[total] == sum(round_[part] for round_ in rounds)
        for part in ("draft_ms", "verify_ms", "overhead_ms"):
            assert timings[part] == pytest.approx(sum(round_[part] for round_ in rounds))
        assert {(round_["source"], round_["rows"]) for round_ in rounds} == {("model", 1)}
    for path, prompt in (("/v1/completions", "prompt"), ("/v1/responses", "input")):
        assert server.post(path, {**body, prompt: "a", "max_output_tokens": 9}).json()["rounds"]
    assert server.post("/v1/messages", body).json()["rounds"]
    assert "rounds" not in server.post(CHAT, BODY).json()


def test_rows_and_draft_tokens_by_rows(demo: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(demo) as server:
        server.post(CHAT, {**BODY, "n": 2})
        props = server.client.get("/props").json()
        lengths = props["speculative"]["draft_length_by_rows"]
        assert 0 < lengths["2"] <= 3  # what the length policy of this server allows
        until(lambda: server.client.get("/props").json()["rows"] == {"running": 0, "waiting": 0})
        gate = Gate(demo, monkeypatch)
        queue = server.service.queue  # rows that are held before their first evaluation
        with server.client.stream("POST", CHAT, json={**BODY, "stream": True, "n": 2}):
            until(lambda: server.client.get("/props").json()["rows"]["running"] == 2)
            gate.open()
        until(lambda: not queue.sequences()[0])


def part(raw: str, *deltas: ContentDelta | ReasoningDelta, drafted: bool = True) -> AnswerPart:
    return AnswerPart(deltas, Piece(raw, 1, (Span(raw, drafted),) if raw else ()))


def test_spans_of_what_a_parser_held_back() -> None:
    """Marks and thoughts are not among them."""
    builder = DeltaBuilder()
    parts = [
        part("Hm"),
        part("m</think>", ReasoningDelta("Hmm")),
        part("\n\nSo ", drafted=False),
        part("it", ContentDelta("So it")),
        part(" is", ContentDelta(" is"), drafted=False),
    ]
    told = builder.add(parts)
    assert isinstance(told[-1], Content)
    assert told[-1].text == "So it is"
    assert told[-1].spans == (Span("So ", False), Span("it", True), Span(" is", False))


def test_text_that_also_stands_in_a_mark() -> None:
    (said,) = DeltaBuilder().add([part("</think>", drafted=False), part("t", ContentDelta("t"))])
    assert isinstance(said, Content)
    assert said.spans == (Span("t", True),)


def test_text_that_the_model_did_not_write_so() -> None:
    (said,) = DeltaBuilder().add([part("a", ContentDelta("b"))])
    assert isinstance(said, Content)
    assert said.spans == (Span("b", False),)
