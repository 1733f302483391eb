"""`llamaspec chat`: a conversation at the terminal, or one message per line of a pipe.

What is said and kept is the session's business (`llamaspec/chat/session.py`), what is typed `typed.py`'s.
Answers go to stdout, everything else to stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import click

from llamaspec.chat.session import (
    ConversationFiles,
    Reply,
    Session,
    Settings,
    keep_last,
    load_last,
)  # fmt: skip
from llamaspec.cli.model_options import ModelChoice, chat_model_options, find_files, learning
from llamaspec.cli.options import (
    UNLIMITED,
    ChatOptions,
    DecodingOptions,
    Decorator,
    GroupedCommand,
    answer_decoding_options,
    chat_options,
    chosen_detail,
    option_group,
    refusing_values,
    settings_of,
    statistics_options,
    with_setting,
)  # fmt: skip
from llamaspec.cli.output import (
    Detail,
    SlowProgress,
    Thoughts,
    message_of,
    say,
    statistics_lines,
    write_text,
)  # fmt: skip
from llamaspec.cli.typed import ReadLine, Typed, line_editing, piped_line, read_typed, terminal_line
from llamaspec.engine.generation import StopReason
from llamaspec.engine.stream import Progress
from llamaspec.errors import LlamaspecError, PromptError, printable
from llamaspec.opening import demo_target
from llamaspec.pair import Pair

_LAST = "last"


class _LastOrSize(click.ParamType):  # type: ignore[type-arg]
    """The word for the last conversation, or a number of tokens."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value == _LAST else click.INT.convert(value, param, ctx)


_FILES: tuple[Decorator, ...] = (
    click.option("--save", metavar="FILE", help="Write the conversation to a new file after every answer."),
    click.option("--load", metavar="FILE",
                 help="Go on with a saved conversation; may be the file of --save."),
    click.option("--resume", is_flag=True,
                 help="Go on with the conversation that was held last at a terminal."),
    click.option("-c", "last_or_size", type=_LastOrSize(), is_flag=False, flag_value=_LAST, multiple=True,
                 metavar="[N]", help="Alone the same as --resume; with a number, --n-ctx."),
    click.option("--keep/--no-keep", default=True, show_default=True,
                 help="Keep the conversation for --resume, in the cache folder, readable by you alone."),
    *statistics_options(None, "Statistics after every answer"),
)  # fmt: skip
_REASONING: tuple[Decorator, ...] = (
    click.option("--reasoning", type=click.Choice(["show", "hide", "off"]), default="show", show_default=True,
                 help="What a model thinks before it answers goes to stderr, or nowhere; off asks it not to "
                      "think."),
    click.option("--reasoning-budget", type=click.IntRange(min=0), metavar="N",
                 help="End thinking after this many tokens."),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ReasoningOptions:
    """What becomes of what a model thinks."""

    is_shown: bool
    budget: int | None  # tokens
    template_kwargs: dict[str, bool]  # what the chat template is told


def _reasoning(*, reasoning: str, reasoning_budget: int | None) -> ReasoningOptions:
    """From the command line; a model that thinks though it was asked not to has no tokens for it."""
    if reasoning == "off":
        return ReasoningOptions(False, 0, {"enable_thinking": False})
    return ReasoningOptions(reasoning == "show", reasoning_budget, {})


@dataclass(frozen=True, slots=True)
class FileOptions:
    """Where a conversation comes from and goes to, and what is told of it."""

    save: str | None
    load: str | None
    resume: bool
    keep: bool
    stats: Detail | None
    n_ctx: int | None  # of -c N


def _files(
    *, resume: bool, last_or_size: tuple[str | int, ...], stats: Detail | None, no_stats: bool, **given: Any
) -> FileOptions:
    """From the command line, where -c has two meanings."""
    sizes = [size for size in last_or_size if isinstance(size, int)]
    resume = resume or _LAST in last_or_size
    if resume and given["load"] is not None:
        raise ValueError("--resume and --load both name a conversation; drop one")
    detail = chosen_detail(stats, no_stats, None)
    return FileOptions(resume=resume, n_ctx=sizes[-1] if sizes else None, stats=detail, **given)


@click.command(
    cls=GroupedCommand,
    epilog="""\b
Examples:
  llamaspec chat --target llama-70b-instruct.Q4.gguf --draft llama-8b-instruct.Q4.gguf
  llamaspec chat --pair qwen3-14b --resume
  llamaspec chat --target big-instruct.gguf --system "Answer in one sentence." --save talk.json
  llamaspec chat --target big-instruct.gguf --load talk.json --save talk.json
  llamaspec chat --target big-instruct.gguf < questions.txt > answers.txt
""",
)
@chat_options
@option_group("thinking", _reasoning, _REASONING)
@option_group("files", _files, _FILES)
@chat_model_options
@answer_decoding_options
def chat(
    conversation: ChatOptions,
    thinking: ReasoningOptions,
    files: FileOptions,
    models: ModelChoice,
    decoding: DecodingOptions,
) -> None:
    """Talk with a model. Each line is a message; /help lists the commands."""
    if files.n_ctx is not None:
        with refusing_values():
            if models.n_ctx is not None:
                raise ValueError("-c and --n-ctx both name the size of the context; drop one")
            models = models.with_context(files.n_ctx)
    own_files = ConversationFiles()
    messages = own_files.load(files.load) if files.load is not None else None
    if files.resume:
        messages = load_last()
    save_to = own_files.writable(files.save) if files.save is not None else None
    seed = decoding.seed_or_random()
    with learning(find_files(models), models, decoding) as (pair, policy):
        how = (decoding.sampling, seed, decoding.max_tokens, decoding.rule)
        settings = Settings(*how, policy, thinking.budget, thinking.template_kwargs)
        template = conversation.read_template(pair)
        thoughts = Thoughts(is_shown=thinking.is_shown)
        session = Session(
            pair, template, settings, system=conversation.system, tell=say, on_reasoning=thoughts.add
        )
        if pair.target.path == demo_target():
            say("the embedded model was made to continue Python; name a model that converses with --target")
        if messages is not None:
            session.replace(messages)
        if files.resume:
            say(f"going on with the last conversation: {len(session.messages)} messages")
        if decoding.seed is None:
            say(f"the seed is {seed}; --seed {seed} gives the same answers again")
        ChatLoop(session, pair, own_files, save_to, files, replace(decoding, seed=seed), thoughts).run()


HELP = '''\
/help              this list
/reset             begin anew; the system prompt stays
/continue          more of the last answer, where it was stopped
/regenerate        another answer to your last message
/edit              change your last message in $EDITOR, and have it answered anew
/set NAME VALUE    temperature, top-k, seed, max-tokens and others, from now on; /set alone shows them
/save FILE         write the conversation to a file
/load FILE         go on with a conversation from a file
/stats             how fast the last answer was, and how much of the conversation was cached; /stats full
                   says where the time went
/exit, /quit       leave; so does Ctrl-D
Ctrl-C stops an answer and keeps what was said. Several lines that are pasted are one message. A line that
ends with \\ goes on in the next one; a line that begins with """ opens a block that ends with """. A space
before / makes it a message.'''

LEAVE = {"/exit", "/quit"}

_Takes = Literal["nothing", "a file", "anything"]


class ChatLoop:
    """Reads what is typed, a message or a command, until the person leaves."""

    def __init__(
        self,
        session: Session,
        pair: Pair,
        own_files: ConversationFiles,  # what may be overwritten
        save_to: Path | None,  # written after every answer
        files: FileOptions,
        decoding: DecodingOptions,  # with the session's seed
        thoughts: Thoughts,
    ) -> None:
        self._session = session
        self._pair = pair
        self._files = own_files
        self._save_to = save_to
        self._stats = files.stats
        self._decoding = decoding
        self._thoughts = thoughts
        self._interactive = sys.stdin is not None and sys.stdin.isatty()
        self._keeps = files.keep and (self._interactive or files.resume)
        self._commands: dict[str, tuple[_Takes, Callable[[str], None]]] = {
            "/help": ("nothing", lambda _: click.echo(HELP, err=True)),
            "/reset": ("nothing", self._reset),
            "/continue": ("nothing", lambda _: self._show(self._session.go_on)),
            "/regenerate": ("nothing", lambda _: self._show(self._session.regenerate)),
            "/edit": ("nothing", self._edit),
            "/set": ("anything", self._set),
            "/save": ("a file", self._save),
            "/load": ("a file", self._load),
            "/stats": ("anything", self._statistics),
        }

    def run(self) -> None:
        """Until the person leaves."""
        if not self._interactive:
            while self._turn(piped_line):
                pass
            return
        name = printable(self._pair.target.path.name)
        click.echo(f"Chat with {name}. /help lists the commands.", err=True)
        with line_editing():
            while self._turn(terminal_line):
                pass

    def _turn(self, read_line: ReadLine) -> bool:
        """One message or command; False when the person leaves. A pipe ends with the first fault."""
        try:
            typed = self._next(read_line)
            if typed is not None:
                self._act(typed)
        except LlamaspecError as error:
            if not self._interactive:
                raise
            say(message_of(error))
            return True
        except KeyboardInterrupt:  # at the prompt: nothing is lost
            if not self._interactive:
                raise
            click.echo("\n/exit or Ctrl-D leaves", err=True)
            return True
        return typed is not None

    def _next(self, read_line: ReadLine) -> Typed | None:
        """What is typed next; None when the person leaves."""
        try:
            typed = read_typed(read_line)
        except EOFError:
            if self._interactive:
                click.echo(err=True)
            return None
        return None if typed.is_command and typed.text.strip() in LEAVE else typed

    def _act(self, typed: Typed) -> None:
        """Answer a message or obey a command; an empty one is nothing."""
        if not typed.text.strip():
            return
        if not typed.is_command:
            self._show(lambda on_prefill: self._session.ask(typed.text, on_prefill))
            return
        name, _, argument = typed.text.strip().partition(" ")
        if name not in self._commands:
            raise PromptError(
                f"there is no command {name}; /help lists them, a space before / makes it a message"
            )
        takes, command = self._commands[name]
        argument = argument.strip()
        if takes == "a file" and not argument:
            raise PromptError(f"{name} needs a file: {name} FILE")
        if takes == "nothing" and argument:
            raise PromptError(f"{name} stands alone")
        command(argument)

    def _show(self, answer: Callable[[Progress], Generator[str, None, None]]) -> None:
        """Write an answer as it comes; Ctrl-C stops it and keeps what was said."""
        before = self._session.last
        try:
            with (
                SlowProgress("prefilling the conversation") as progress,
                closing(answer(progress.part)) as pieces,
            ):
                for text in pieces:
                    progress(1.0)
                    self._thoughts.end()
                    write_text(text)
        except KeyboardInterrupt:
            self._after(before)
            if not self._interactive:
                raise
        except LlamaspecError:
            if self._session.last is not before:
                click.echo()
            raise
        else:
            self._after(before)

    def _after(self, before: Reply | None) -> None:
        """End the answer's line, save, and say what there is to say about it."""
        self._thoughts.end()
        click.echo()
        last = self._session.last
        if last is None or last is before:
            say("stopped before a word was said; the conversation is as it was")
            return
        if self._save_to is not None:
            self._files.save(self._save_to, self._session.messages)
        self._keep()
        if last.completion.stop_reason is StopReason.CONTEXT:
            say("the context is full, so the answer ends here; a larger --n-ctx allows more")
        elif last.completion.stop_reason is StopReason.LIMIT:
            say(f"stopped after {len(last.completion.tokens)} tokens; /continue gives more")
        elif last.before is not None and not last.completion.tokens:
            say("the model had ended this answer; there is no more of it")
        if self._stats is not None:
            self._show_statistics(self._stats)

    def _keep(self) -> None:
        """For --resume; what cannot be kept is told once, and disturbs nobody."""
        if not self._keeps:
            return
        try:
            keep_last(self._session.messages)
        except LlamaspecError as error:
            self._keeps = False
            say(f"warning: {error}, or --no-keep")

    def _reset(self, _argument: str) -> None:
        self._session.reset()
        say("the conversation begins anew")

    def _edit(self, _argument: str) -> None:
        if not self._interactive:
            raise PromptError("/edit opens an editor, which needs a terminal; write the message anew")
        try:
            edited = click.edit(self._session.last_message, extension=".md")
        except click.ClickException as error:
            reason = error.format_message().rstrip(".")
            raise PromptError(f"the editor failed: {reason}; set EDITOR to one that works") from error
        if edited is None or not edited.strip():
            say("nothing was saved in the editor; the conversation is as it was")
            return
        self._show(lambda on_prefill: self._session.ask_instead(edited.rstrip("\n"), on_prefill))

    def _set(self, argument: str) -> None:
        if argument:
            name, _, value = argument.partition(" ")
            self._decoding = with_setting(self._decoding, name, value.strip())
            assert self._decoding.seed is not None
            self._session.settings = replace(
                self._session.settings,
                sampling=self._decoding.sampling,
                seed=self._decoding.seed,
                max_tokens=self._decoding.max_tokens,
            )
            return
        for name, found in settings_of(self._decoding).items():
            shown = "off" if found is None else "none" if found == UNLIMITED else found
            click.echo(f"{name.replace('_', '-'):18} {shown}", err=True)

    def _save(self, name: str) -> None:
        path = self._files.writable(name)
        self._files.save(path, self._session.messages)
        say(f"saved to {path}")

    def _load(self, name: str) -> None:
        self._session.replace(self._files.load(name))
        say(f"going on with {name}: {len(self._session.messages)} messages")

    def _statistics(self, argument: str) -> None:
        if argument not in ("", "full"):
            raise PromptError("/stats stands alone, or with full: /stats full")
        self._show_statistics("full" if argument else "short")

    def _show_statistics(self, detail: Detail) -> None:
        last, totals = self._session.last, self._session.totals
        if last is None:
            say("there is no answer yet, so nothing to tell")
            return
        for line in statistics_lines(last.completion, last.seed, detail):
            click.echo(line, err=True)
        share = totals.n_cached / max(1, totals.n_prompt_tokens)
        n_context = last.completion.n_prompt_tokens + len(last.completion.tokens)
        answers = "1 answer" if totals.n_answers == 1 else f"{totals.n_answers} answers"
        click.echo(
            f"conversation: {n_context} of {self._pair.target.context_size} tokens; in {answers} "
            f"{totals.n_cached} of {totals.n_prompt_tokens} prompt tokens were cached ({share:.0%})",
            err=True,
        )
