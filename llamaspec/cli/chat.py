"""`llamaspec chat`: a conversation at the terminal, or one message per line from a pipe.

`chat/session.py` keeps the conversation, `chat_input.py` reads the input. Only answers go to stdout.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import click
from click.core import ParameterSource

from llamaspec.chat.conversation_files import ConversationFiles, keep_last, load_last
from llamaspec.chat.session import ChatSettings, Reply, Session
from llamaspec.chat.template import ChatTemplate
from llamaspec.cli import options as shared
from llamaspec.cli.chat_input import ReadLine, Typed, line_editing, piped_lines, read_typed, terminal_line
from llamaspec.cli.model_options import (
    ModelChoice,
    fetched_model,
    find_plan,
    model_or_plain_options,
    reporting,
)
from llamaspec.cli.option_groups import Decorator, GroupedCommand, Integer, refusing_values, section
from llamaspec.cli.output import Detail, SlowProgress, Thoughts, message_of, say, statistics_lines, write_text
from llamaspec.cli.signals import interrupts_are_not_echoed, signals_reach_input
from llamaspec.cli.wrapping import WordWrap
from llamaspec.engine.completion import StopReason
from llamaspec.engine.stream import Progress
from llamaspec.errors import LlamaspecError, PromptError, printable
from llamaspec.pair import Pair, demo_target
from llamaspec.plan import AUTO, known_draft

_FILES: tuple[Decorator, ...] = (
    click.option("--save", metavar="FILE", help="Save the conversation to a new file after every answer."),
    click.option("--load", metavar="FILE",
                 help="Resume a saved conversation; may be the same file as --save."),
    click.option("--resume", is_flag=True,
                 help="Resume the last conversation held at a terminal."),
    click.option("--keep/--no-keep", default=True, show_default=True,
                 help="Store the conversation for --resume in the cache folder, readable only by you."),
    *shared.statistics_options(None, "Statistics after every answer"),
)  # fmt: skip
_REASONING: tuple[Decorator, ...] = (
    click.option("--reasoning", type=click.Choice(["show", "hide", "off"]), default="show", show_default=True,
                 help="Show the model's reasoning on stderr, or hide it; off = ask the model not to reason."),
    click.option("--reasoning-budget", type=Integer(min=0), metavar="N",
                 help="Stop reasoning after this many tokens."),
)  # fmt: skip


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
@shared.chat_options
@section("Reasoning", _REASONING)
@section("Files", _FILES)
@model_or_plain_options
@shared.answer_decoding_options
def chat(
    conversation: shared.ChatOptions,
    models: ModelChoice,
    decoding: shared.DecodingOptions,
    reasoning: str,
    reasoning_budget: int | None,
    save: str | None,
    load: str | None,
    resume: bool,
    keep: bool,
    stats: Detail | None,
    no_stats: bool,
    message: str | None = None,  # the only one; from `run`
) -> None:
    """Chat with a model. Each line is a message; /help lists the commands."""
    with refusing_values():
        detail = shared.chosen_detail(stats, no_stats, None)
        if resume and load is not None:
            raise ValueError("--resume and --load both name a conversation; drop one")
    files = ConversationFiles()
    messages = files.load(load) if load is not None else None
    if resume:
        messages = load_last()
    save_to = files.writable(save) if save is not None else None
    seed = decoding.seed_or_random()
    with reporting(find_plan(models), models, decoding) as pair:
        how = (decoding.sampling, seed, decoding.max_tokens, decoding.rule, pair.length)
        settings = ChatSettings(*how, reasoning_budget)
        if reasoning == "off":  # the budget holds for models that reason whatever the template says
            settings = replace(settings, reasoning_budget=0, template_kwargs={"enable_thinking": False})
        thoughts = Thoughts(is_shown=reasoning == "show")
        session = Session(
            pair,
            ChatTemplate.of(pair.target, conversation.chat_template),
            settings,
            system=conversation.system,
            on_remark=say,
            on_reasoning=thoughts.add,
        )
        if pair.target.path == demo_target():
            say("the embedded model only continues Python code; name a chat model with --target")
        if messages is not None:
            session.replace(messages)
        if resume:
            say(f"resuming the last conversation: {len(session.messages)} messages")
        if decoding.seed is None:
            say(f"the seed is {seed}; --seed {seed} gives the same answers again")
        interactive = message is None and sys.stdin is not None and sys.stdin.isatty()
        keeps = keep and (interactive or resume)
        decoding = replace(decoding, seed=seed)
        loop = _Loop(session, pair, thoughts, decoding, files, save_to, detail, interactive, keeps)
        if message is not None:
            loop.act(Typed(message, is_command=False))
            return
        if not interactive:
            loop.run(piped_lines())
            return
        click.echo(f"Chat with {printable(pair.target.path.name)}. /help lists the commands.", err=True)
        loop.recall()
        with line_editing(), signals_reach_input():
            loop.run(terminal_line)


@click.command(
    cls=GroupedCommand,
    context_settings={"ignore_unknown_options": True},
    epilog="""\b
Examples:
  llamaspec run qwen3-14b
  llamaspec run qwen3-14b "Why is the sky blue?"             one answer
  llamaspec run hf:owner/big-GGUF:Q4_K_M --system "Answer in one sentence."
""",
)
@click.argument("arguments", metavar="NAME [MESSAGE] [OPTIONS OF CHAT]...", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def run(context: click.Context, arguments: tuple[str, ...]) -> None:
    """Chat with a model or pair by name, fetching it if needed."""
    with chat.make_context("run", [*arguments], context.parent, allow_extra_args=True) as inner:
        if not inner.args:
            raise click.UsageError("name the model to run, such as qwen3-14b", context)
        name, *words = inner.args
        for option in ("target", "pair"):
            if inner.get_parameter_source(option) is ParameterSource.COMMANDLINE:
                raise click.UsageError(f"{name} is the model to run; drop --{option}", context)
        fetched_model(name)
        inner.params["message"] = _message(words)
        inner.params["target"] = name
        if not inner.params["draft"] and known_draft(name, fetched_model) is not None:
            inner.params["draft"] = AUTO
        chat.invoke(inner)


def _message(words: Sequence[str]) -> str | None:
    """Return the message on the command line of `run`, if there is one; PromptError if it says nothing."""
    message = " ".join(words)
    if words and not message.strip():
        raise PromptError("the message is empty; drop it for a chat")
    try:
        message.encode()
    except UnicodeEncodeError as error:
        raise PromptError("the message is not UTF-8; convert it first") from error
    return message or None


HELP = '''\
/help              this list
/reset             clear the conversation; the system prompt stays
/continue          continue the last answer
/regenerate        get another answer to your last message
/edit              edit your last message in $EDITOR, and get a new answer
/set NAME VALUE    change temperature, top-k, seed, max-tokens and others; /set alone shows them
/save FILE         save the conversation to a file
/load FILE         resume a conversation from a file
/stats             show the speed of the last answer and how much was cached; /stats full also shows
                   where the time went
/exit, /bye        leave; Ctrl-D does the same
Commands may be shortened, such as /regen. Ctrl-C stops an answer and keeps its text. Pasted lines are
one message. A line that ends with \\ continues on the next one; """ opens a block of lines, and """
closes it. A message that starts with / needs a space before it.'''

EXIT = "/exit"
SYNONYMS = {"/?": "/help", "/clear": "/reset", "/quit": EXIT, "/bye": EXIT}  # in other programs
WITH_ARGUMENT = {"/set", "/save", "/load", "/stats"}


def _command(given: str, names: Iterable[str]) -> str:
    """Return the command that a name means, which may be its beginning; PromptError if that is none."""
    known = {**{name: name for name in names}, **SYNONYMS}
    meant = {known[given]} if given in known else {known[name] for name in known if name.startswith(given)}
    if len(meant) == 1:
        return meant.pop()
    fault = f"{given} may be {' or '.join(sorted(meant))}" if meant else f"there is no command {given}"
    raise PromptError(f"{fault}; see /help, or put a space before / to send it as a message")


@dataclass(slots=True)
class _Loop:
    """Reads messages and commands until the user leaves."""

    session: Session
    pair: Pair
    thoughts: Thoughts
    decoding: shared.DecodingOptions  # with the session's seed
    files: ConversationFiles  # overwrites only files that this chat has read or written
    save_to: Path | None  # written after every answer
    stats: Detail | None  # shown after every answer
    interactive: bool
    keeps: bool  # store the conversation for --resume

    def run(self, read_line: ReadLine) -> None:
        """Run until the user leaves. An error ends a chat from a pipe."""
        while self._turn(read_line):
            pass

    def _turn(self, read_line: ReadLine) -> bool:
        """Handle one message or command; return False to leave."""
        try:
            return self.act(read_typed(read_line))
        except EOFError:
            if self.interactive:
                click.echo(err=True)
            return False
        except (LlamaspecError, KeyboardInterrupt) as error:
            if not self.interactive:
                raise
            if isinstance(error, LlamaspecError):
                say(message_of(error))
            else:  # at the prompt there is nothing to interrupt
                click.echo("\n/exit or Ctrl-D leaves", err=True)
        return True

    def act(self, typed: Typed) -> bool:
        """Answer a message or run a command; ignore an empty line. Return False to leave."""
        text = typed.text.strip()
        if not text:
            return True
        if not typed.is_command:
            self._show(lambda on_prefill: self.session.ask(typed.text, on_prefill))
            return True
        actions: dict[str, Callable[[str], None]] = {
            "/help": lambda _: click.echo(HELP, err=True),
            "/reset": lambda _: self._reset(),
            "/continue": lambda _: self._show(self.session.continue_answer),
            "/regenerate": lambda _: self._show(self.session.regenerate),
            "/edit": lambda _: self._edit(),
            "/set": self._set,
            "/save": self._save,
            "/load": self._load,
            "/stats": self._statistics,
            EXIT: lambda _: None,
        }
        given, _, argument = text.partition(" ")
        name, argument = _command(given, actions), argument.strip()
        if argument and name not in WITH_ARGUMENT:
            raise PromptError(f"{name} takes no argument")
        if not argument and name in ("/save", "/load"):
            raise PromptError(f"{name} needs a file: {name} FILE")
        actions[name](argument)
        return name != EXIT

    def _show(self, answer: Callable[[Progress], Generator[str, None, None]]) -> None:
        """Write an answer as it arrives; Ctrl-C stops it and keeps its text."""
        before = self.session.last
        wrap = WordWrap()
        try:
            with (
                interrupts_are_not_echoed(),
                SlowProgress("processing the conversation") as progress,
                closing(answer(progress.part)) as pieces,
            ):
                for text in pieces:
                    progress(1.0)
                    self.thoughts.end()
                    write_text(text, wrap=wrap)
        except KeyboardInterrupt:
            self._after(before)
            if not self.interactive:
                raise
        except LlamaspecError:
            if self.session.last is not before:
                click.echo()
            raise
        else:
            self._after(before)

    def _after(self, before: Reply | None) -> None:
        """End the answer's line, save the conversation, and report how the answer ended."""
        self.thoughts.end()
        click.echo()
        last = self.session.last
        if last is None or last is before:
            say("stopped before the answer began; the conversation is unchanged")
            return
        if self.save_to is not None:
            self.files.save(self.save_to, self.session.messages)
        if self.keeps:
            try:
                keep_last(self.session.messages)
            except LlamaspecError as error:
                self.keeps = False  # warn once
                say(f"warning: {error}, or --no-keep")
        if last.completion.stop_reason is StopReason.CONTEXT:
            say("the context is full, so the answer ends here; raise --n-ctx for more")
        elif last.completion.stop_reason is StopReason.LIMIT:
            more = "; /continue writes more" if self.interactive else ""
            say(f"stopped after {len(last.completion.tokens)} tokens{more}")
        elif last.continues and not last.completion.tokens:
            say("the answer is already complete; there is nothing to continue")
        if self.stats is not None:
            self._show_statistics(self.stats)

    def _reset(self) -> None:
        self.session.reset()
        say("conversation cleared")

    def _edit(self) -> None:
        if not self.interactive:
            raise PromptError("/edit needs a terminal for the editor; type the message again")
        try:
            edited = click.edit(self.session.last_message, extension=".md")
        except click.ClickException as error:
            reason = error.format_message().rstrip(".")
            raise PromptError(f"the editor failed: {reason}; set EDITOR to one that works") from error
        if edited is None or not edited.strip():
            say("nothing was saved in the editor; the conversation is unchanged")
            return
        self._show(lambda on_prefill: self.session.ask_instead(edited.rstrip("\n"), on_prefill))

    def _set(self, argument: str) -> None:
        name, _, value = argument.partition(" ")
        if value:
            self.decoding = shared.with_setting(self.decoding, name, value.strip())
            self.session.settings = replace(
                self.session.settings,
                sampling=self.decoding.sampling,
                seed=self.decoding.seed_or_random(),
                max_tokens=self.decoding.max_tokens,
            )
            return
        for setting, found in shared.settings_of(self.decoding, name).items():
            shown = "off" if found is None else "none" if found == shared.UNLIMITED else found
            click.echo(f"{setting.replace('_', '-'):18} {shown}", err=True)

    def _save(self, name: str) -> None:
        path = self.files.writable(name)
        self.files.save(path, self.session.messages)
        say(f"saved to {path}")

    def _load(self, name: str) -> None:
        self.session.replace(self.files.load(name))
        say(f"resuming {name}: {len(self.session.messages)} messages")
        self.recall()

    def recall(self) -> None:
        """Show the last exchange of a resumed conversation at a terminal."""
        for message in self.session.messages[-2:] if self.interactive else ():
            mark = "You: " if message.role == "user" else ""
            click.echo(printable(f"{mark}{message.text}", keep="\n\t"), err=True)

    def _statistics(self, argument: str) -> None:
        if argument not in ("", "full"):
            raise PromptError("use /stats or /stats full")
        self._show_statistics("full" if argument else "short")

    def _show_statistics(self, detail: Detail) -> None:
        last, totals = self.session.last, self.session.totals
        if last is None:
            say("there is no answer yet")
            return
        is_plain = not self.pair.sources or self.decoding.draft_length == 0
        for line in statistics_lines(last.completion, last.seed, detail, is_plain=is_plain):
            click.echo(line, err=True)
        share = totals.n_cached / max(1, totals.n_prompt_tokens)
        n_context = last.completion.n_prompt_tokens + len(last.completion.tokens)
        answers = "1 answer" if totals.n_answers == 1 else f"{totals.n_answers} answers"
        click.echo(
            f"conversation: {n_context} of {self.pair.target.context_size} tokens; in {answers} "
            f"{totals.n_cached} of {totals.n_prompt_tokens} prompt tokens were cached ({share:.0%})",
            err=True,
        )
