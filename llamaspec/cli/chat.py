"""`llamaspec chat`: a conversation at the terminal, or one message per line of a pipe.

Answers go to stdout, everything else to stderr. What is said and kept is the session's business.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path

import click

from llamaspec.chat.conversation import Reply, Session, Settings
from llamaspec.chat.saved import ConversationFiles
from llamaspec.cli.chat_options import (
    ChatOptions,
    FileOptions,
    ReasoningOptions,
    chat_options,
    file_options,
    reasoning_options,
)
from llamaspec.cli.decoding_options import DecodingOptions, decoding_options, make_policy
from llamaspec.cli.lines import (
    ReadLine,
    Typed,
    at_terminal,
    line_editing,
    piped_line,
    read_typed,
    terminal_line,
)
from llamaspec.cli.messages import message_of
from llamaspec.cli.model_options import ModelChoice, find_files, model_or_plain_options
from llamaspec.cli.opening import open_files
from llamaspec.cli.report import statistics_lines
from llamaspec.cli.terminal import SlowProgress, Thoughts, say, write_text
from llamaspec.engine.events import StopReason
from llamaspec.engine.stream import Progress
from llamaspec.errors import LlamaspecError, PromptError, printable
from llamaspec.measure.learned_length import keep_prior
from llamaspec.pair import Pair, demo_target

HELP = '''\
/help          this list
/reset         begin anew; the system prompt stays
/save FILE     write the conversation to a file
/load FILE     go on with a conversation from a file
/stats         how fast the last answer was, and how much of the conversation was cached
/regenerate    another answer to your last message
/exit, /quit   leave; so do Ctrl-D and Ctrl-C
Ctrl-C stops an answer and keeps what was said. A line that ends with \\ goes on in the next one; a line
that begins with """ opens a block that ends with """. A space before / makes it a message.'''

LEAVE = {"/exit", "/quit"}


@click.command(
    epilog="""\b
Examples:
  llamaspec chat --target llama-70b-instruct.Q4.gguf --draft llama-8b-instruct.Q4.gguf
  llamaspec chat --target big-instruct.gguf --system "Answer in one sentence." --save talk.json
  llamaspec chat --target big-instruct.gguf --load talk.json --save talk.json
  llamaspec chat --target big-instruct.gguf < questions.txt > answers.txt
"""
)
@chat_options
@reasoning_options
@file_options
@model_or_plain_options
@decoding_options
def chat(
    conversation: ChatOptions,
    thinking: ReasoningOptions,
    files: FileOptions,
    models: ModelChoice,
    decoding: DecodingOptions,
) -> None:
    """Talk with a model. Each line is a message; /help lists the commands."""
    own_files = ConversationFiles()
    messages = own_files.load(files.load) if files.load is not None else None
    save_to = own_files.writable(files.save) if files.save is not None else None
    seed = decoding.seed_or_random()
    with open_files(find_files(models), models) as pair:
        policy = make_policy(pair, decoding)
        settings = Settings(
            decoding.sampling,
            seed,
            decoding.max_tokens,
            decoding.rule,
            policy,
            thinking.budget,
            thinking.template_kwargs,
        )
        template = conversation.read_template(pair)
        thoughts = Thoughts(is_shown=thinking.reasoning == "show")
        session = Session(
            pair, template, settings, system=conversation.system, tell=say, on_reasoning=thoughts.add
        )
        if pair.target.path == demo_target():
            say("the embedded model was made to continue Python; name a model that converses with --target")
        if messages is not None:
            session.replace(messages)
        if decoding.seed is None:
            say(f"the seed is {seed}; --seed {seed} gives the same answers again")
        try:
            _Chat(session, pair, own_files, save_to, files.stats, thoughts).run()
        finally:
            keep_prior(pair, policy)


class _Chat:
    """The loop between a person and a session."""

    def __init__(
        self,
        session: Session,
        pair: Pair,
        files: ConversationFiles,
        save_to: Path | None,
        stats: bool,
        thoughts: Thoughts,
    ) -> None:
        self._thoughts = thoughts
        self._session = session
        self._pair = pair
        self._files = files
        self._save_to = save_to
        self._stats = stats
        self._interactive = at_terminal()
        self._commands: dict[str, tuple[bool, Callable[[str], None]]] = {  # whether it takes a file
            "/help": (False, lambda _: click.echo(HELP, err=True)),
            "/reset": (False, self._reset),
            "/save": (True, self._save),
            "/load": (True, self._load),
            "/stats": (False, lambda _: self._show_statistics()),
            "/regenerate": (False, lambda _: self._show(self._session.regenerate)),
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
        return typed is not None

    def _next(self, read_line: ReadLine) -> Typed | None:
        """What is typed next; None when the person leaves."""
        try:
            typed = read_typed(read_line)
        except (EOFError, KeyboardInterrupt) as end:
            if not self._interactive and isinstance(end, KeyboardInterrupt):
                raise
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
        takes_file, command = self._commands[name]
        argument = argument.strip()
        if takes_file != bool(argument):
            raise PromptError(f"{name} needs a file: {name} FILE" if takes_file else f"{name} stands alone")
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
        if last.completion.stop_reason is StopReason.CONTEXT:
            say("the context is full, so the answer ends here; a larger --n-ctx allows more")
        elif last.completion.stop_reason is StopReason.LIMIT:
            say(f"stopped after {len(last.completion.tokens)} tokens; a larger --max-tokens allows more")
        if self._stats:
            self._show_statistics()

    def _reset(self, _argument: str) -> None:
        self._session.reset()
        say("the conversation begins anew")

    def _save(self, name: str) -> None:
        path = self._files.writable(name)
        self._files.save(path, self._session.messages)
        say(f"saved to {path}")

    def _load(self, name: str) -> None:
        self._session.replace(self._files.load(name))
        say(f"going on with {name}: {len(self._session.messages)} messages")

    def _show_statistics(self) -> None:
        last, totals = self._session.last, self._session.totals
        if last is None:
            say("there is no answer yet, so nothing to tell")
            return
        for line in statistics_lines(last.completion, last.seed):
            click.echo(line, err=True)
        share = totals.n_cached / max(1, totals.n_prompt_tokens)
        n_context = last.completion.n_prompt_tokens + len(last.completion.tokens)
        answers = "1 answer" if totals.n_answers == 1 else f"{totals.n_answers} answers"
        click.echo(
            f"conversation: {n_context} of {self._pair.target.context_size} tokens; in {answers} "
            f"{totals.n_cached} of {totals.n_prompt_tokens} prompt tokens were cached ({share:.0%})",
            err=True,
        )
