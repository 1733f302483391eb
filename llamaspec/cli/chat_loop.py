"""The loop between a person and a conversation: what is typed is a message or a command.

Answers go to stdout, everything else to stderr.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Literal

import click

from llamaspec.chat.session import ConversationFiles, Reply, Session, keep_last
from llamaspec.cli.chat_options import FileOptions
from llamaspec.cli.decoding_options import UNLIMITED, DecodingOptions, settings_of, with_setting
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
from llamaspec.cli.report import Detail, statistics_lines
from llamaspec.cli.terminal import SlowProgress, Thoughts, say, write_text
from llamaspec.engine.events import StopReason
from llamaspec.engine.stream import Progress
from llamaspec.errors import LlamaspecError, PromptError, printable
from llamaspec.pair import Pair

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
    """Reads what is typed until the person leaves.

    Parameters
    ----------
    session : Session
    pair : Pair
        That of the session.
    own_files : ConversationFiles
        What may be overwritten.
    save_to : Path, optional
        A file to write after every answer.
    files : FileOptions
    decoding : DecodingOptions
        With the session's seed.
    thoughts : Thoughts
        Where the session's reasoning goes.
    """

    def __init__(
        self,
        session: Session,
        pair: Pair,
        own_files: ConversationFiles,
        save_to: Path | None,
        files: FileOptions,
        decoding: DecodingOptions,
        thoughts: Thoughts,
    ) -> None:
        self._session = session
        self._pair = pair
        self._files = own_files
        self._save_to = save_to
        self._stats = files.stats
        self._decoding = decoding
        self._thoughts = thoughts
        self._interactive = at_terminal()
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
