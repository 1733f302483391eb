"""`llamaspec chat`: the session on tiny models, the pipe, and a person at a real terminal."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pexpect
import pytest

from chat_models import ASCII, PLAIN, SENTENCEPIECE, TEMPLATE, with_template, write_chat_model
from command import ENTRY, environment, generate, invoke, naming
from llamaspec import (
    FixedLength,
    ModelFileError,
    ModelOptions,
    Pair,
    PromptError,
    Sampling,
    StopReason,
    open_pair,
)
from llamaspec.app.lines import Typed, read_typed
from llamaspec.app.saved import ConversationFiles, load_conversation, save_conversation
from llamaspec.app.session import REGENERATION, Session, Settings
from llamaspec.app.transcript import Transcript
from llamaspec.llama import model as model_module
from llamaspec.llama.template import ChatTemplate
from llamaspec.llama.trie import Trie, merge
from llamaspec.values import Message
from model_store import ModelStore
from tiny_models import Recipe
from tiny_vocabulary import Vocabulary

TALKER = Recipe(dtype="q8_0", vocabulary=ASCII, n_context=1 << 13)
ENDING = Recipe(dtype="q8_0", vocabulary=ASCII, n_context=1 << 11, end_score=9.0)  # answers of a few tokens
OpenSession = Callable[..., Session]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chat")


@pytest.fixture(scope="module")
def talker(folder: Path) -> list[Path]:
    """A target that talks without end, and its draft."""
    target = write_chat_model(folder / "talker.gguf", TALKER)
    return [target, write_chat_model(folder / "draft.gguf", TALKER.draft(), template=None)]


@pytest.fixture(scope="module")
def pair(talker: list[Path]) -> Iterator[Pair]:
    options = ModelOptions(n_ctx=1024, threads=1)
    with open_pair(*talker, target_options=options, draft_options=options) as opened:
        yield opened


class Remarks(list[str]):
    def __call__(self, remark: str) -> None:
        self.append(remark)


def session(
    pair: Pair,
    *,
    seed: int = 5,
    max_tokens: int = 20,
    system: str | None = None,
    tell: Remarks | None = None,
    template: ChatTemplate | None = None,
    n_guesses: int = 3,
) -> Session:
    pair.target.forget()
    settings = Settings(Sampling(temperature=1.0), seed, max_tokens, "coupled", FixedLength(n_guesses))
    template = template or ChatTemplate.of(pair.target)
    return Session(pair, template, settings, system=system, tell=Remarks() if tell is None else tell)


def say(session: Session, text: str) -> str:
    return "".join(session.ask(text))


def last(session: Session) -> tuple[int, int, int]:
    """Of the last answer: tokens of its prompt, those remembered, tokens of the answer."""
    assert session.last is not None
    completion = session.last.completion
    return completion.n_prompt_tokens, completion.n_remembered, len(completion.tokens)


# A common prefix costs nothing


def test_only_what_is_new_is_read(pair: Pair) -> None:
    """Everything is remembered but the last token of the answer, which was never evaluated."""
    chat = session(pair, system="Be brief.")
    say(chat, "hello there")
    n_prompt, n_remembered, n_answer = last(chat)
    assert (n_remembered, n_answer) == (0, 20)
    for _ in range(3):
        known = n_prompt + n_answer
        say(chat, "and then?")
        n_prompt, n_remembered, n_answer = last(chat)
        assert n_remembered == known - 1


def test_an_answer_that_ends_is_remembered_as_a_whole(folder: Path) -> None:
    """The model has read it to say that it ends there."""
    path = write_chat_model(folder / "ending.gguf", ENDING)
    with open_pair(path, target_options=ModelOptions(threads=1)) as ending:
        chat = session(ending, max_tokens=500, n_guesses=0)
        known = 0
        for text in ("one", "two", "three"):
            say(chat, text)
            n_prompt, n_remembered, n_answer = last(chat)
            assert chat.last is not None
            assert chat.last.completion.stop_reason is StopReason.END
            assert n_remembered == known
            known = n_prompt + n_answer


def test_what_is_remembered_is_not_evaluated(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the conversation is longer than the parts in which a prompt is read."""
    evaluated: list[int] = []

    def counted(*arguments: object, **settings: object) -> Trie:
        trie = merge(*arguments, **settings)  # type: ignore[arg-type]
        evaluated.append(len(trie.nodes))
        return trie

    monkeypatch.setattr(model_module, "merge", counted)
    with open_pair(pair.target.path, target_options=ModelOptions(n_ctx=2048, threads=1)) as alone:
        chat = session(alone, n_guesses=0)
        say(chat, "once upon a time " * 60)
        assert last(chat)[0] > 600
        evaluated.clear()
        say(chat, "and then?")
        n_prompt, n_remembered, n_answer = last(chat)
        assert n_remembered > 600
        assert sum(evaluated) == n_prompt - n_remembered + n_answer - 1


@pytest.mark.parametrize("forgets", [False, True])
def test_memory_and_draft_change_nothing(pair: Pair, forgets: bool) -> None:
    def talk(n_guesses: int) -> list[str]:
        chat = session(pair, n_guesses=n_guesses)
        answers = []
        for text in ("one", "two", "three"):
            answers.append(say(chat, text))
            if forgets:
                pair.target.forget()
        return answers

    assert talk(3) == talk(0) == talk(3)


@pytest.mark.parametrize("kind", ["gemma3", "mamba", "lfm2"])
def test_conversations_with_other_memories(store: ModelStore, kind: str) -> None:
    """A memory that cannot go back reads anew, and says the same."""
    with open_pair(store.path(kind), target_options=ModelOptions(threads=1)) as other:
        template = ChatTemplate(TEMPLATE, "<s>", "</s>")
        chat, fresh = (session(other, template=template, n_guesses=0) for _ in range(2))
        answers = [say(chat, text) for text in ("one", "two", "three")]
        for text, answer in zip(("one", "two", "three"), answers, strict=True):
            other.target.forget()
            assert say(fresh, text) == answer
        assert fresh.totals.n_remembered == 0


@pytest.mark.parametrize("vocabulary", [ASCII, SENTENCEPIECE], ids=["byte-level", "sentencepiece"])
@pytest.mark.parametrize("template", [TEMPLATE, PLAIN], ids=["control tokens", "plain text"])
def test_tokens_of_the_model_are_kept(folder: Path, vocabulary: Vocabulary, template: str) -> None:
    """A model may write "the" with other tokens than the tokenizer would."""
    path = folder / f"{len(list(folder.iterdir()))}.gguf"
    write_chat_model(path, Recipe(vocabulary=vocabulary), template)
    with open_pair(path, target_options=ModelOptions(threads=1)) as opened:
        words, render = opened.target.vocabulary, ChatTemplate.of(opened.target).render
        transcript = Transcript(words)
        talk = [Message("user", "the end")]
        first = transcript.read(render(talk).encode()).tolist()
        assert first == words.tokenize_rendered(render(talk).encode()).tolist()
        spelt = [token_of(letter, opened) for letter in (b"t", b"h", b"e")]
        transcript.wrote(spelt)
        talk += [Message("assistant", "the"), Message("user", "the end")]
        second = transcript.read(render(talk).encode()).tolist()
        assert second[: len(first) + 3] == first + spelt
        canonical = words.tokenize_rendered(render(talk).encode()).tolist()
        assert second != canonical
        assert b"".join(map(words.piece, second)) == b"".join(map(words.piece, canonical))
        assert transcript.read(render(talk).encode()).tolist() == second  # asked again, nothing is new
        # Another text has its own tokens.
        other = render([Message("user", "he ended")]).encode()
        assert transcript.read(other).tolist() == words.tokenize_rendered(other).tolist()


MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)


def test_spaces_that_the_template_writes_itself(folder: Path) -> None:
    """Such models begin their answers with a space; kept in the message, it would come twice."""
    path = write_chat_model(folder / "spaces.gguf", Recipe(vocabulary=ASCII), MISTRAL)
    with open_pair(path, target_options=ModelOptions(threads=1)) as opened:
        chat = session(opened, max_tokens=4)
        for number in range(200):
            chat.reset()
            answer = say(chat, str(number))
            if answer[0] == " " and answer[1:] == answer.strip():
                break
        assert chat.messages[-1].text == answer[1:]
        n_prompt, _, n_answer = last(chat)
        say(chat, "and then?")
        assert last(chat)[1] == n_prompt + n_answer - 1


def token_of(text: bytes, pair: Pair) -> int:
    words = pair.target.vocabulary
    return next(token for token in range(words.size - 1, -1, -1) if words.piece(token) == text)


def test_half_a_character_is_tokenized_anew(store: ModelStore) -> None:
    """What is not UTF-8 is shown as U+FFFD, and the conversation goes on with what was shown."""
    with open_pair(store.path("llama"), target_options=ModelOptions(threads=1)) as opened:
        words = opened.target.vocabulary
        transcript = Transcript(words)
        transcript.read(b"[user]a[assistant]")
        transcript.wrote([token_of(b"o", opened), token_of(b"\xef", opened), token_of(b"\xbc", opened)])
        text = "[user]a[assistant]o\ufffd[user]".encode()
        assert b"".join(map(words.piece, transcript.read(text).tolist())) == text


# The session


def test_each_turn_has_its_seed(pair: Pair) -> None:
    chat = session(pair, seed=40)
    seeds = []
    for text in ("one", "two"):
        say(chat, text)
        assert chat.last is not None
        seeds.append(chat.last.seed)
    assert seeds == [40, 41]
    chat.reset()
    say(chat, "one")
    assert [chat.last.seed if chat.last else None] == [40]


def test_the_first_answer_is_that_of_generate(pair: Pair, talker: list[Path]) -> None:
    chat = session(pair, seed=3, system="Be brief.")
    answer = say(chat, "hello")
    options = ["--chat", "--system", "Be brief.", "-t", "1", "--seed", "3", "-n", "20", "--n-ctx", "1024"]
    generated = generate("hello", *options, "--json", models=talker).json
    assert generated["text"] == answer
    assert generated["prompt_tokens"] == last(chat)[0]


def test_regenerate(pair: Pair) -> None:
    remarks = Remarks()
    chat = session(pair, tell=remarks)
    with pytest.raises(PromptError, match="no answer to regenerate"):
        chat.regenerate()
    first = say(chat, "one")
    second = "".join(chat.regenerate())
    n_prompt, n_remembered, _ = last(chat)
    assert n_remembered == n_prompt - 1
    assert chat.last is not None
    assert chat.last.seed == 5 + REGENERATION
    assert second != first
    assert [message.text for message in chat.messages] == ["one", second]
    third = "".join(chat.regenerate())
    assert third not in (first, second)


def test_stopping_keeps_what_was_said(pair: Pair) -> None:
    chat = session(pair)
    whole = say(session(pair), "one")
    with closing(chat.ask("one")) as pieces:
        said = next(pieces) + next(pieces)
    assert chat.messages == (Message("user", "one"), Message("assistant", said))
    assert whole.startswith(said)
    assert chat.last is not None
    assert chat.last.completion.stop_reason is StopReason.INTERRUPT
    say(chat, "two")
    assert last(chat)[1] >= last(chat)[0] - len("</s>[user]two</s>[assistant]")


def test_stopping_before_a_word_takes_the_message_back(pair: Pair) -> None:
    chat = session(pair)

    def interrupt(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(chat.ask("one", interrupt))
    assert chat.messages == ()
    assert chat.last is None


class Spy(ChatTemplate):
    """Remembers what was asked last."""

    asked: tuple[str, ...] = ()

    def render(self, messages: Sequence[Message]) -> str:
        if messages[-1].role == "user":
            self.asked = tuple(message.text for message in messages)
        return super().render(messages)


def test_old_turns_are_left_out_when_the_context_is_full(talker: list[Path]) -> None:
    remarks = Remarks()
    template = Spy(TEMPLATE, "<s>", "</s>")
    with open_pair(talker[0], target_options=ModelOptions(n_ctx=256, threads=1)) as small:
        chat = session(small, system="Be brief.", tell=remarks, template=template)
        texts = [f"message {i}" for i in range(10)]
        n_drops = n_known = 0
        for text in texts:
            assert len(say(chat, text)) > 0
            assert template.asked[0] == "Be brief."
            assert template.asked[-1] == text
            n_prompt, n_remembered, n_answer = last(chat)
            assert n_prompt + n_answer <= 256
            n_drops += n_remembered < n_known - 1
            n_known = n_prompt + n_answer
        assert len(chat.messages) == 1 + 2 * len(texts)  # nothing is lost for /save
        assert chat.last is not None
        assert chat.last.seed == 5 + 9
    # Room is made in large steps: only the turns after a drop read what was known before.
    assert n_drops == len(remarks) == 2
    assert "outgrown the context of 256 tokens" in remarks[0]
    assert "but with the system prompt" in remarks[0]


def test_a_message_that_does_not_fit(talker: list[Path]) -> None:
    with open_pair(talker[0], target_options=ModelOptions(n_ctx=256, threads=1)) as small:
        chat = session(small)
        say(chat, "one")
        before = chat.messages
        with pytest.raises(PromptError, match=r"tokens with what .* the context 256; shorten it"):
            say(chat, "x" * 300)
        assert chat.messages == before
        say(chat, "x" * 200)  # fits alone
        assert len(chat.messages) == 4


def test_a_full_context_ends_the_answer(talker: list[Path]) -> None:
    with open_pair(talker[0], target_options=ModelOptions(n_ctx=128, threads=1)) as small:
        chat = session(small, max_tokens=1000)
        say(chat, "one")
        assert chat.last is not None
        assert chat.last.completion.stop_reason is StopReason.CONTEXT
        say(chat, "two")  # goes on without the turn that filled it
        assert last(chat)[0] < 128


# Templates


def refusal(template: str, messages: list[Message]) -> str:
    with pytest.raises(PromptError) as caught:
        ChatTemplate(template, "<s>", "</s>").render(messages)
    assert "\n" not in str(caught.value)
    return str(caught.value)


HELLO = Message("user", "hello")
NO_SYSTEM = "{{ raise_exception('No system role') if messages[0].role == 'system' }}"


@pytest.mark.parametrize(
    ("template", "messages", "says"),
    [
        (
            NO_SYSTEM,
            [Message("system", "x"), HELLO],
            "refuses: No system role; leave --system out",
        ),
        ("{{ raise_exception('Roles must\n alternate.') }}", [HELLO], "refuses: Roles must alternate; pass"),
        ("{{ messages[7].content.x }}", [HELLO], "refuses: "),
        ("{{ 1 + 'a' }}", [HELLO], "refuses: unsupported operand"),
        ("{% for %}", [HELLO], "the chat template is not valid: "),
    ],
)
def test_templates_that_refuse(template: str, messages: list[Message], says: str) -> None:
    assert says in refusal(template, messages)


def test_a_refused_message_leaves_no_trace(pair: Pair) -> None:
    chat = session(pair, template=ChatTemplate("{{ raise_exception('no') }}", "", ""))
    with pytest.raises(PromptError):
        say(chat, "one")
    assert chat.messages == ()


def test_a_model_without_a_template(talker: list[Path]) -> None:
    with open_pair(talker[1]) as plain, pytest.raises(ModelFileError, match=r"no chat template.*--target"):
        ChatTemplate.of(plain.target)
    for command in (["chat"], ["generate", "--chat", "hi"]):
        answer = invoke(*command, *naming(talker[1:]))
        assert answer.code == 1
        assert len(answer.complaints) == 1
        assert "--chat-template FILE" in answer.complaints[0]


@pytest.mark.parametrize("template", [TEMPLATE, TEMPLATE.replace("{{ bos_token }}", "")])
def test_a_conversation_begins_once(pair: Pair, template: str) -> None:
    """Whether or not the template writes the token that begins a text."""
    text = ChatTemplate(template, "<s>", "</s>").render([HELLO]).encode()
    tokens = pair.target.vocabulary.tokenize_rendered(text).tolist()
    assert tokens.count(pair.target.vocabulary.bos) == 1
    assert tokens[0] == pair.target.vocabulary.bos


def test_the_copied_file_is_the_same_model(store: ModelStore, tmp_path: Path) -> None:
    plain = store.path("llama")
    with open_pair(plain) as a, open_pair(with_template(plain, tmp_path / "new.gguf", "x")) as b:
        assert b.target.metadata("tokenizer.chat_template") == "x"
        assert a.stream("the end", seed=1, max_tokens=8).run().tokens == (
            b.stream("the end", seed=1, max_tokens=8).run().tokens
        )


# Files


def test_save_and_load(pair: Pair, tmp_path: Path) -> None:
    chat = session(pair, system="Grüße, „kurz“.")
    say(chat, "one")
    save_conversation(tmp_path / "talk.json", chat.messages)
    content = json.loads((tmp_path / "talk.json").read_text(encoding="utf-8"))
    assert content[0] == {"role": "system", "content": "Grüße, „kurz“."}
    others = [session(pair, system="Something else."), session(pair)]
    for other in others:
        other.replace(load_conversation(tmp_path / "talk.json"))
        assert other.messages == chat.messages
    assert say(others[0], "two") == say(others[1], "two")
    assert others[0].last is not None
    assert others[0].last.seed == 5 + 1
    assert [path.name for path in tmp_path.iterdir()] == ["talk.json"]


@pytest.mark.parametrize(
    "content",
    [
        "", "{}x", "3", '{"a": 1}', '["x"]', '[{"role": "user"}]', '[{"role": "cat", "content": "x"}]',
        '[{"role": "user", "content": ["x"]}]', '[{"role": "user", "content": "\\ud800"}]',
    ],
)  # fmt: skip
def test_files_that_hold_no_conversation(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(PromptError, match="is no conversation"):
        load_conversation(path)


def test_strange_files_are_not_overwritten(tmp_path: Path) -> None:
    files = ConversationFiles()
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(PromptError, match="exists"):
        files.writable(str(tmp_path / "other.json"))
    files.load(str(tmp_path / "other.json"))
    files.save(files.writable(str(tmp_path / "other.json")), [HELLO])
    assert load_conversation(tmp_path / "other.json") == (HELLO,)
    with pytest.raises(PromptError, match="there is no folder"):
        files.writable(str(tmp_path / "none" / "x.json"))


# What is typed


@pytest.mark.parametrize(
    ("lines", "typed"),
    [
        (["hello"], Typed("hello", False)),
        (["/stats"], Typed("/stats", True)),
        ([" /stats"], Typed(" /stats", False)),
        (["one\\", "two\\", "three"], Typed("one\ntwo\nthree", False)),
        (["one\\"], Typed("one", False)),
        (['"""', "one", "", "two", '"""'], Typed("one\n\ntwo", False)),
        (['"""one', 'two"""'], Typed("one\ntwo", False)),
        (['"""one"""'], Typed("one", False)),
        (['"""', "/stats", '"""'], Typed("/stats", False)),
        (['"""', "one"], Typed("one", False)),
        (["/stats\\", "x"], Typed("/stats\nx", False)),
    ],
)
def test_messages_of_several_lines(lines: list[str], typed: Typed) -> None:
    assert read_typed(reader(lines)) == typed


def reader(lines: list[str]) -> Callable[[str], str]:
    left = iter(lines)

    def read_line(_prompt: str) -> str:
        for line in left:
            return line
        raise EOFError

    return read_line


# Through the entry point


def options(models: list[Path]) -> list[str]:
    more = ["--n-ctx", "1024", "--seed", "5", "-n", "20", "-t", "1", "-k", "3"]
    return ["chat", *map(str, naming(models)), *more]


@pytest.mark.parametrize("leave", ["/exit", "/quit"])
def test_a_pipe(pair: Pair, talker: list[Path], tmp_path: Path, leave: str) -> None:
    chat = session(pair)
    answers = [say(chat, "one"), say(chat, "two\nthree")]
    save = tmp_path / "talk.json"
    stdin = f"one\n\ntwo\\\nthree\n/stats\n{leave}\nfour\n".encode()
    piped = invoke(*options(talker), "--save", save, stdin=stdin)
    assert piped.code == 0
    assert piped.stdout == "".join(f"{answer}\n" for answer in answers)
    assert f"{last(chat)[1]} of them remembered" in piped.stderr
    assert "of 1024 tokens; in 2 answers" in piped.stderr
    assert load_conversation(save) == chat.messages
    # A file of another chat is not overwritten, its own is.
    assert "exists" in invoke(*options(talker), "--save", save, stdin=b"x\n").stderr
    again = invoke(*options(talker), "--load", save, "--save", save, stdin=b"five\n")
    assert again.stdout == load_conversation(save)[-1].text + "\n"
    assert load_conversation(save)[:-1] == (*chat.messages, Message("user", "five"))


@pytest.mark.parametrize(
    ("arguments", "stdin", "says"),
    [
        ([], b"/nonsense\n", "there is no command /nonsense; /help lists them"),
        ([], b"/save\n", "/save needs a file"),
        ([], b"/load none.json\n", "cannot read the conversation none.json"),
        ([], b"/reset all\n", "/reset stands alone"),
        ([], b"/regenerate\n", "no answer to regenerate"),
        ([], b"caf\xe9\n", "the message is not UTF-8: byte 3 is 0xe9"),
        (["--load", "none.json"], b"", "cannot read the conversation none.json"),
        (["--save", "none/talk.json"], b"", "there is no folder none"),
        (["--chat-template", "none.jinja"], b"", "cannot read the chat template none.jinja"),
    ],
)
def test_faults_end_a_pipe(talker: list[Path], arguments: list[str], stdin: bytes, says: str) -> None:
    answer = invoke(*options(talker), *arguments, stdin=stdin)
    assert answer.code == 1
    assert answer.stdout == ""
    assert len(answer.complaints) == 1
    assert says in answer.complaints[0]


def test_an_own_template(talker: list[Path], tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(PLAIN)
    arguments = ["hi", "-n", "5", "--json", "--chat", "--chat-template", str(tmp_path / "own.jinja")]
    answer = generate(*arguments, models=talker[1:])
    assert answer.code == 0
    assert answer.json["prompt_tokens"] > len("hi") + 8
    assert "need --chat" in generate("hi", "--system", "x", models=talker).stderr


# A person at a terminal


@pytest.fixture
def spawn(talker: list[Path], tmp_path: Path) -> Iterator[Callable[..., pexpect.spawn]]:
    children = []

    def start(*more: str, n_tokens: int = 20) -> pexpect.spawn:
        env = environment({"XDG_STATE_HOME": str(tmp_path), "HOME": str(tmp_path), "TERM": "dumb"})
        arguments = [*ENTRY[1:], *options(talker), "-n", str(n_tokens), "--n-ctx", "8192", *more]
        child = pexpect.spawn(
            ENTRY[0], arguments, env=env, timeout=20, encoding="utf-8", dimensions=(24, 200), cwd=tmp_path
        )
        children.append(child)
        child.expect("/help lists the commands")
        child.expect("> ")
        return child

    yield start
    for child in children:
        child.close(force=True)


def send(child: pexpect.spawn, line: str) -> str:
    """Type a line; what is shown until the next prompt."""
    child.sendline(line)
    child.expect_exact(line)
    child.expect("> ")
    shown: str = child.before
    return shown.replace("\r\n", "\n").strip("\n")


def test_a_person_talks(spawn: Callable[..., pexpect.spawn], pair: Pair) -> None:
    chat = session(pair)
    child = spawn()
    shown = send(child, "one")
    assert shown.startswith(say(chat, "one").strip("\n"))
    assert "stopped after 20 tokens" in shown
    send(child, "two")
    say(chat, "two")
    assert f"{last(chat)[1]} of them remembered" in send(child, "/stats")
    assert send(child, "/regenerate").startswith("".join(chat.regenerate()).strip("\n"))
    assert "saved to talk.json" in send(child, "/save talk.json")
    assert "begins anew" in send(child, "/reset")
    assert "no answer yet" in send(child, "/stats")
    assert "going on with talk.json: 4 messages" in send(child, "/load talk.json")
    assert "there is no command /what" in send(child, "/what")
    assert "/regenerate    another answer" in send(child, "/help")
    child.sendline('"""')
    child.expect(r"\.\.\. ")
    child.sendline("three")
    child.expect(r"\.\.\. ")
    child.sendline('four"""')
    child.expect(r"stopped after 20 tokens[^\n]*\n")
    child.expect("> ")
    child.sendeof()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0


def test_ctrl_c(spawn: Callable[..., pexpect.spawn], tmp_path: Path) -> None:
    """During an answer it stops that and keeps it, at the prompt it leaves; the history stays."""
    child = spawn("--save", "talk.json", n_tokens=8000)
    child.sendline("tell me a story")
    child.expect("tell me a story\r\n")
    child.expect(r"[^\s]{2}")  # something is said
    child.sendintr()
    child.expect("> ")
    messages = load_conversation(tmp_path / "talk.json")
    assert [message.role for message in messages] == ["user", "assistant"]
    assert len(messages[1].text) > 0
    assert "stopped by interrupt" in send(child, "/stats")
    child.sendline("line one\\")
    child.expect(r"\.\.\. ")
    time.sleep(0.2)  # a signal just before Python waits for a line is noticed after the line
    child.sendintr()
    child.expect("> ")  # takes the unfinished message back
    time.sleep(0.2)
    child.sendintr()
    child.expect(pexpect.EOF)
    assert "Traceback" not in child.before
    child.close()
    assert child.exitstatus == 0
    child = spawn()
    child.send("\x10\x10\x10")  # Ctrl-P three times: up in the history
    child.expect("tell me a story")
