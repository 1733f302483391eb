"""The benchmark's tasks, their order, and the turns of its arms, with known answers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import llamaspec
from llamaspec.errors import LlamaspecError, PromptError
from llamaspec.llama.options import ModelOptions
from llamaspec.measure.bench import WARM_UP, Ask, ask_all
from llamaspec.measure.served_arms import PEER_PLAIN, PLAIN, Answer, RefusedError, own_arms, peer_arms
from llamaspec.measure.tasks import BenchTask, Turn, context_for, quick_tasks, read_tasks, requests_of
from llamaspec.plan import DraftPlan, ModelFile

EDITS = [
    "annotate", "rename", "signature", "logging", "docstrings", "translate comments", "mend", "add a field"
]  # fmt: skip
SINGLE = ["ask", "explain", "write code", "translate", "summarise", "json", *EDITS]
TALKS = ["chat", "agent", "logs"]
LONG = 1500  # characters: more than 500 tokens if half of them are digits and punctuation


class Recorder:
    """Arms with known answers, and the requests that they received."""

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
    assert [task.name for task in tasks] == [*SINGLE, *TALKS]
    asked = [request.turn.user for request in requests_of(tasks)]
    assert len(asked) == 29
    assert sum(len(text) > LONG for text in asked) >= len(asked) / 3, "much of the time is prompt processing"
    texts = [turn.user for task in tasks for turns in task.conversations() for turn in turns]
    assert not any("<<" in text for text in texts)
    edits = [turns[0].user for task in tasks if task.name in EDITS for turns in task.conversations()]
    assert all(60 < len(text.splitlines()) < 150 for text in edits)
    assert [task.name for task in tasks if task.json_schema] == ["json"]
    assert [task.name for task in tasks if task.max_tokens == 1024] == EDITS, "whole files"
    assert [len(task.turns) for task in tasks if task.turns] == [4, 4, 2]
    assert [task.name for task in read_tasks(names=["agent", "ask"])] == ["ask", "agent"]
    assert [task.name for task in read_tasks(names=["edits", "ask"])] == ["ask", *EDITS], "a group"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot read the tasks"),
        ("tasks: []", "there is no task"),
        ("tasks: [", "is not a file of tasks"),
        ("just text", "is not a file of tasks"),
        ("tasks: [{name: a, group: b}]", "the task 'a' has neither prompts nor turns"),
        ("tasks: [{name: a, group: b, prompts: [c], kind: d}]", "tasks.0.kind"),
        ("tasks: [{name: a, group: b, prompts: [c]}]", "no task x, y in own.yaml; choose one of a, b"),
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


def test_conversations_continue_after_requests_of_others() -> None:
    """Turns used to follow each other at once, which hid servers that forget or slow down with time."""
    tasks = read_tasks()
    requests = requests_of(tasks)
    assert [request.label for request in requests_of(read_tasks())] == [each.label for each in requests]
    for task in tasks:
        own = [request.turn for request in requests if request.task is task]
        assert own == [turn for turns in task.conversations() for turn in turns], "in their order"
        conversations = [each.conversation for each in requests if each.task is task]
        assert len({*conversations}) == len(task.conversations())
    for task in tasks:
        places = [i for i, request in enumerate(requests) if request.task is task]
        between = [
            sum(len(request.turn.user) for request in requests[i + 1 : j]) for i, j in pairwise(places)
        ]
        assert not task.turns or min(between) > LONG, f"{task.name} continues at once"
    assert all(a.task is not b.task for a, b in pairwise(requests))


def test_every_conversation_has_room_in_the_context() -> None:
    tasks = [BenchTask("a", "g", (100 * "x",)), BenchTask("b", "g", turns=(Turn("x", 6000 * "y"), Turn("z")))]
    assert context_for(tasks[:1], None) == 4096, "never less"
    assert context_for(tasks, None) == 4096
    assert context_for(tasks, 600) == 5120, "3000 + 2 * (600 + 64), rounded up"
    assert context_for(read_tasks(), None) == 4096


def test_arms_take_turns_with_the_same_prompts() -> None:
    recorder, lines = Recorder(), list[str]()
    asks = {PLAIN: recorder.arm(PLAIN, "one"), "auto": recorder.arm("auto", "two")}
    talk = BenchTask("talk", "g", turns=(Turn("hello"), Turn("more", "recorded"), Turn("end")))
    tasks = [BenchTask("ask", "g", ("why", "how"), json_schema={"type": "object"}), talk]
    samples = [*ask_all(asks, tasks, {"max_tokens": 9, "temperature": 0.5}, 2, lines.append)]
    assert lines[:2] == ["1/10 talk, turn 1, plain: 3.00 s", "1/10 talk, turn 1, auto: 3.00 s"]
    warm_up, asked = recorder.asked[:2], recorder.asked[2:]
    assert [texts for _, texts, _ in warm_up] == [[WARM_UP], [WARM_UP]]
    assert [[each.arm for each in request] for request in samples] == 10 * [[PLAIN, "auto"]]
    labels = ["talk, turn 1", "ask 1", "talk, turn 2", "talk, turn 3", "ask 2"]
    assert [request[0].prompt for request in samples] == 2 * labels
    assert [request[0].repeat for request in samples] == [0, 0, 0, 0, 0, 1, 1, 1, 1, 1]
    assert [name for name, _, _ in asked] == 5 * [PLAIN, "auto", "auto", PLAIN], "the order rotates"
    prompts = [texts for _, texts, _ in asked]
    own = {PLAIN: "one", "auto": "two"}
    said = [["?" if text == own[name] else text for text in texts] for name, texts, _ in asked]
    assert said[::2] == said[1::2], "both arms get the same requests, except for their own answers"
    assert prompts[0] == ["[3]\nhello"]
    assert prompts[2] == ["[1]\nwhy"]
    assert prompts[4] == ["[3]\nhello", own[asked[4][0]], "more"]
    assert prompts[6] == ["[3]\nhello", own[asked[6][0]], "more", "recorded", "end"]
    assert prompts[8] == ["[2]\nhow"]
    assert len({texts[0] for texts in prompts}) == 6, "no conversation begins like another"
    body = asked[2][2]
    assert (body["max_tokens"], body["temperature"]) == (9, 0.5)
    long = BenchTask("edit", "g", ("this",), max_tokens=77)
    next(ask_all(asks, [long], {}, 1, lines.append))
    assert recorder.asked[-1][2]["max_tokens"] == 77, "as the task says, unless an option does"
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert "response_format" not in asked[0][2]
    assert [each["seed"] for _, _, each in asked[:4]] == [0, 0, 1, 1]


def test_the_rest_of_a_refused_conversation_is_left_out() -> None:
    recorder, lines = Recorder(refused="more"), list[str]()
    talk = BenchTask("talk", "g", turns=(Turn("hello"), Turn("more"), Turn("end")))
    tasks = [talk, BenchTask("ask", "g", ("why",))]
    samples = [*ask_all({PLAIN: recorder.arm(PLAIN, "one")}, tasks, {}, 1, lines.append)]
    assert [request[0].prompt for request in samples] == ["talk, turn 1", "ask"]
    assert [line for line in lines if "left out" in line] == [
        "talk, turn 2 is left out: plain refused it: too long"
    ]


def test_a_quick_run_is_one_request_of_each_kind() -> None:
    requests = requests_of(quick_tasks())
    assert sorted(each.label for each in requests) == ["explain", "rename", "write code"]
    assert sum(each.fields["max_tokens"] for each in requests) < 400


def test_llama_server_gets_the_same_files_and_settings() -> None:
    options = ModelOptions(threads=3, n_ctx=2048, gpu_layers=7, flash_attention="on", cache_type_v="q8_0")
    files = DraftPlan(ModelFile(Path("t.gguf"), options), ModelFile(Path("d.gguf"), ModelOptions()))
    arms = {arm.name: " ".join(arm.words) for arm in peer_arms("server", files)}
    names = [f"llama-server, {kind}" for kind in ("none", "draft-simple", "ngram-simple", "ngram-mod")]
    assert [*arms] == names
    plain = "server -m t.gguf -np 1 -c 2048 -t 3 -ngl 7 -fa on -ctk f16 -ctv q8_0"
    more = ["", " --spec-type draft-simple -md d.gguf", " --spec-type ngram-simple", " --spec-type ngram-mod"]
    assert [*arms.values()] == [plain + each for each in more]
    with_heads = replace(files, draft=None, heads=files.target)
    assert [arm.words[-1] for arm in peer_arms("server", with_heads)][1] == "draft-mtp"
    file_of_heads = replace(files, draft=None, heads=ModelFile(Path("h.gguf"), options))
    assert [*peer_arms("server", file_of_heads)][1].words[-4:] == (
        "--spec-type",
        "draft-mtp",
        "-md",
        "h.gguf",
    )
    alone = replace(files, draft=None)
    assert [arm.name for arm in peer_arms("server", alone)] == [names[0], *names[2:]]
    two = [*peer_arms("server", files, ["ngram-mod"], n_parallel=2)]
    assert [arm.name for arm in two] == [PEER_PLAIN, "llama-server, ngram-mod"], "with the baseline"
    assert " -np 2 " in " ".join(two[0].words)
    with pytest.raises(LlamaspecError, match="--spec-types draft-simple needs a --draft"):
        [*peer_arms("server", alone, ["draft-simple"])]


def test_another_arm_may_have_another_draft() -> None:
    options = ["--draft", "d.gguf", "--draft-ctx", "64", "--draft", "e.gguf"]
    words = [arm.words[4:] for arm in own_arms(options, ["--draft none"], None)]
    assert words[1][:6] == tuple(options)
    assert words[2][:2] == ("--draft-ctx", "64")
    assert words[2][-2:] == ("--draft", "none")
    assert words[2].count("--draft") == 1


def test_checkouts_are_started_from_their_folders(tmp_path: Path) -> None:
    (tmp_path / "llamaspec").mkdir()
    (tmp_path / "llamaspec" / "__main__.py").touch()
    arms = [*own_arms(["--draft", "d.gguf"], ["-k 2 --exact"], tmp_path)]
    assert [arm.name for arm in arms] == [PLAIN, "auto", "-k 2 --exact", "before: auto"]
    fixed = ["--parallel", "1", "--request-timeout", "0", "--grace", "1"]
    plainly = ["--no-draft", "--no-ngram", "-k", "0"]
    for arm, more in zip(arms, (plainly, [], ["-k", "2", "--exact"], []), strict=True):
        assert [*arm.words[3:]] == ["serve", "--draft", "d.gguf", *fixed, *more]
    folders = [arm.environment["PYTHONPATH"].split(os.pathsep)[0] for arm in arms]
    assert folders == 3 * [str(Path(llamaspec.__file__).parents[1])] + [str(tmp_path)]
