"""The benchmark's tasks, the turns of its arms, and what it computes: with answers that are known."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import llamaspec
from llamaspec.errors import LlamaspecError, PromptError
from llamaspec.llama.options import ModelOptions
from llamaspec.measure.bench import (
    WARM_UP,
    BenchTask,
    PromptFigures,
    Sample,
    Turn,
    ask_all,
    best_of,
    figures,
    fork,
    n_requests,
    prompt_figures,
    read_tasks,
)
from llamaspec.measure.served_arms import PLAIN, Answer, Ask, RefusedError, own_arms, peer_arms
from llamaspec.measure.store import ModelFile, PairFiles

KINDS = ["ask", "explain", "write code", "translate", "summarise", "json", "edit", "rename", "chat", "agent"]


def answer(seconds: float, first: float = 1.0, n: int = 11, text: str = "same") -> Answer:
    return Answer(text, text, 7, n, seconds, first)


def sample(arm: str, prompt: str, of: Answer, repeat: int = 0) -> Sample:
    return Sample(arm, "group", "task", prompt, repeat, of)


class Recorder:
    """Arms whose answers are known, and what they were asked."""

    def __init__(self, refused: str = "") -> None:
        self.asked: list[tuple[str, list[str], Mapping[str, Any]]] = []
        self._refused = refused

    def arm(self, name: str, reply: str) -> Ask:
        def ask(body: Mapping[str, Any]) -> Answer:
            texts = [message["content"] for message in body["messages"]]
            self.asked.append((name, texts, body))
            if self._refused and self._refused in texts[-1]:
                raise RefusedError(f"{name} refused it: too long")
            return Answer(f"thinks {reply}", reply, 1, 2, 3.0, 1.0)

        return ask


def test_the_tasks_of_the_package() -> None:
    tasks = read_tasks()
    assert [task.name for task in tasks] == KINDS
    assert n_requests(tasks) == 19
    texts = [turn.user for task in tasks for turns in task.conversations() for turn in turns]
    assert not any("<<" in text for text in texts)
    edits = [turns[0].user for task in tasks if task.name == "edit" for turns in task.conversations()]
    assert all(60 < len(text.splitlines()) < 150 for text in edits)
    assert [task.name for task in tasks if task.json_schema] == ["json"]
    assert [task.name for task in tasks if task.max_tokens == 1024] == ["edit", "rename"], "whole files"
    assert [len(task.turns) for task in tasks if task.turns] == [4, 4]
    assert [task.name for task in read_tasks(names=["agent", "ask"])] == ["ask", "agent"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot read the tasks"),
        ("tasks: []", "there is no task"),
        ("tasks: [", "is no file of tasks"),
        ("just text", "is no file of tasks"),
        ("tasks: [{name: a, group: b}]", "the task 'a' has neither prompts nor turns"),
        ("tasks: [{name: a, group: b, prompts: [c], kind: d}]", "tasks.0.kind"),
        ("tasks: [{name: a, group: b, prompts: [c]}]", "there is no task x, y in own.yaml; choose one of a"),
    ],
)
def test_a_file_of_tasks_that_cannot_be_used(tmp_path: Path, content: str | None, says: str) -> None:
    path = tmp_path / "own.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(PromptError) as caught:
        read_tasks(path, ["x", "y"])
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_arms_take_turns_with_the_same_prompts() -> None:
    recorder = Recorder()
    asks = {PLAIN: recorder.arm(PLAIN, "one"), "auto": recorder.arm("auto", "two")}
    talk = BenchTask("talk", "g", turns=(Turn("hello"), Turn("more", "recorded"), Turn("end")))
    tasks = [BenchTask("ask", "g", ("why", "how"), json_schema={"type": "object"}), talk]
    samples = [*ask_all(asks, tasks, {"max_tokens": 9, "temperature": 0.5}, 2, pytest.fail)]
    warm_up, asked = recorder.asked[:2], recorder.asked[2:]
    assert [texts for _, texts, _ in warm_up] == [[WARM_UP], [WARM_UP]]
    assert [[each.arm for each in request] for request in samples] == 10 * [[PLAIN, "auto"]]
    labels = ["ask 1", "ask 2", "talk, turn 1", "talk, turn 2", "talk, turn 3"]
    assert [request[0].prompt for request in samples] == 2 * labels
    assert [request[0].repeat for request in samples] == [0, 0, 0, 0, 0, 1, 1, 1, 1, 1]
    assert [name for name, _, _ in asked] == 5 * [PLAIN, "auto", "auto", PLAIN], "the order rotates"
    prompts = [texts for _, texts, _ in asked]
    own = {PLAIN: "one", "auto": "two"}
    said = [["?" if text == own[name] else text for text in texts] for name, texts, _ in asked]
    assert said[::2] == said[1::2], "both arms are asked the same, but for their own answers"
    assert prompts[0] == ["[1]\nwhy"]
    assert prompts[2] == ["[2]\nhow"]
    assert prompts[8] == ["[3]\nhello", own[asked[8][0]], "more", "recorded", "end"]
    assert [prompts[at][0] for at in (10, 12, 14)] == ["[4]\nwhy", "[5]\nhow", "[6]\nhello"], "never again"
    body = asked[0][2]
    assert (body["max_tokens"], body["temperature"]) == (9, 0.5)
    long = BenchTask("edit", "g", ("this",), max_tokens=77)
    next(ask_all(asks, [long], {}, 1, pytest.fail))
    assert recorder.asked[-1][2]["max_tokens"] == 77, "as the task says, where nobody does"
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert "response_format" not in asked[8][2]
    assert [each["seed"] for _, _, each in asked[:4]] == [0, 0, 1, 1]


def test_a_conversation_that_is_refused_is_left_out_from_there_on() -> None:
    recorder, told = Recorder(refused="more"), list[str]()
    talk = BenchTask("talk", "g", turns=(Turn("hello"), Turn("more"), Turn("end")))
    tasks = [talk, BenchTask("ask", "g", ("why",))]
    samples = [*ask_all({PLAIN: recorder.arm(PLAIN, "one")}, tasks, {}, 1, told.append)]
    assert [request[0].prompt for request in samples] == ["talk, turn 1", "ask"]
    assert told == ["talk, turn 2 is left out: plain refused it: too long"]


def test_ratios_are_to_the_plain_answer_beside() -> None:
    samples = [
        sample(PLAIN, "a", answer(21.0)), sample("auto", "a", answer(11.0, first=6.0)),  # 10 tokens in 5 s
        sample(PLAIN, "a", answer(42.0, first=2.0), 1), sample("auto", "a", answer(7.0, first=3.0), 1),
        sample(PLAIN, "b", answer(5.0)), sample("auto", "b", answer(10.0, first=2.0)),
    ]  # fmt: skip
    by_prompt = prompt_figures(samples, "auto")
    assert [*by_prompt] == ["a", "b"]
    assert by_prompt["a"].whole == pytest.approx((21 / 11 + 42 / 7) / 2)  # the median of two
    assert by_prompt["a"].decoding == pytest.approx((20 / 5 + 40 / 4) / 2)
    assert (by_prompt["a"].seconds, by_prompt["a"].first_seconds) == (9.0, 4.5)
    assert by_prompt["b"].whole == 0.5
    assert by_prompt["b"].decoding == pytest.approx((10 / 8) / (10 / 4))
    assert prompt_figures(samples, PLAIN)["b"].whole == 1.0


def test_a_text_of_other_length_is_scaled_to_plains() -> None:
    plain = answer(21.0, n=11)
    shorter = answer(5.0, first=1.0, n=5, text="other")  # 1 s a token: 11 tokens would take 11 s
    found = prompt_figures([sample(PLAIN, "a", plain), sample("auto", "a", shorter)], "auto")["a"]
    assert found.whole == pytest.approx(21 / 11)
    assert found.decoding == pytest.approx(1 / 0.5)
    assert found.forks == (0,)
    single = answer(4.0, first=4.0, n=1)
    found = prompt_figures([sample(PLAIN, "a", plain), sample("auto", "a", single)], "auto")["a"]
    assert (found.whole, found.decoding) == (21 / 4, None)


@pytest.mark.parametrize(
    ("text", "at"), [("abc", None), ("abd", 2), ("ab", 2), ("abcd", 3), ("", 0), ("xbc", 0)]
)
def test_where_texts_fork(text: str, at: int | None) -> None:
    assert fork(text, "abc") == at


def of(whole: float, decoding: float | None, seconds: float, forks: tuple[int, ...] = ()) -> PromptFigures:
    return PromptFigures(whole, decoding, seconds, seconds / 4, forks, 3)


def test_prompts_are_folded() -> None:
    found = figures({"a": of(2.0, 3.0, 8.0), "b": of(0.5, None, 2.0, (7, 9)), "c": of(8.0, 12.0, 4.0)})
    assert found.whole == pytest.approx(2.0)
    assert found.spread == pytest.approx(4.0)  # the logarithms are -1, 1 and 3 times log 2
    assert (found.worst, found.worst_prompt) == (0.5, "b")
    assert found.decoding == pytest.approx(6.0)
    assert (found.seconds, found.first_seconds) == (4.0, 1.0)
    assert found.forks == {"b": (7, 9)}
    assert (found.n_same, found.n_answers) == (7, 9)
    assert figures({"a": of(2.0, None, 8.0)}).spread == 1.0
    assert figures({"a": of(2.0, None, 8.0)}).decoding is None


def test_the_best_arm_of_each_prompt() -> None:
    arms = [
        {"a": of(2.0, 3.0, 8.0), "b": of(0.5, None, 2.0)},
        {"a": of(1.5, 9.0, 1.0), "b": of(0.6, 1.0, 3.0)},
    ]
    assert best_of(arms) == {"a": arms[0]["a"], "b": arms[1]["b"]}


def test_llama_server_gets_the_same_files_and_settings() -> None:
    options = ModelOptions(threads=3, n_ctx=2048, gpu_layers=7, flash_attention="on", cache_type_v="q8_0")
    files = PairFiles(ModelFile(Path("t.gguf"), options), ModelFile(Path("d.gguf"), ModelOptions()))
    arms = {arm.name: " ".join(arm.command) for arm in peer_arms("server", files)}
    names = [f"llama-server, {kind}" for kind in ("none", "draft-simple", "ngram-simple", "ngram-mod")]
    assert [*arms] == names
    plain = "server -m t.gguf --jinja -np 1 -c 2048 -t 3 -ngl 7 -fa on -ctk f16 -ctv q8_0"
    more = ["", " --spec-type draft-simple -md d.gguf", " --spec-type ngram-simple", " --spec-type ngram-mod"]
    assert [*arms.values()] == [plain + each for each in more]
    with_heads = replace(files, draft=None, heads=True)
    assert [arm.command[-1] for arm in peer_arms("server", with_heads)][1] == "draft-mtp"
    alone = replace(files, draft=None)
    assert [arm.name for arm in peer_arms("server", alone)] == [names[0], *names[2:]]
    with pytest.raises(LlamaspecError, match="--spec-types draft-simple needs a --draft"):
        [*peer_arms("server", alone, ["draft-simple"])]


def test_checkouts_are_started_from_their_folders(tmp_path: Path) -> None:
    (tmp_path / "llamaspec").mkdir()
    (tmp_path / "llamaspec" / "__main__.py").touch()
    arms = [*own_arms(["--draft", "d.gguf"], ["-k 2 --exact"], tmp_path)]
    assert [arm.name for arm in arms] == [PLAIN, "auto", "-k 2 --exact", "before: auto"]
    last = ["--request-timeout", "0", "--grace", "1"]
    for arm, more in zip(arms, (["--no-draft"], [], ["-k", "2", "--exact"], []), strict=True):
        assert [*arm.command[3:]] == ["serve", "--draft", "d.gguf", *more, *last]
    folders = [arm.environment["PYTHONPATH"].split(os.pathsep)[0] for arm in arms]
    assert folders == 3 * [str(Path(llamaspec.__file__).parents[1])] + [str(tmp_path)]
