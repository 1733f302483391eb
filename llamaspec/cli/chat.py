"""`llamaspec chat`: a conversation at the terminal, or one message per line of a pipe.

What is said and kept is the session's business, what is typed the loop's.
"""

from __future__ import annotations

from dataclasses import replace

import click

from llamaspec.chat.session import ConversationFiles, Session, Settings, load_last
from llamaspec.cli.chat_loop import ChatLoop
from llamaspec.cli.chat_options import (
    ChatOptions,
    FileOptions,
    ReasoningOptions,
    chat_options,
    file_options,
    reasoning_options,
)
from llamaspec.cli.decoding_options import DecodingOptions, answer_decoding_options, make_policy
from llamaspec.cli.model_options import ModelChoice, chat_model_options, find_files
from llamaspec.cli.opening import keep_texts, open_files
from llamaspec.cli.option_groups import GroupedCommand, refusing_values
from llamaspec.cli.terminal import Thoughts, say
from llamaspec.measure.store import keep_prior
from llamaspec.opening import demo_target


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
@reasoning_options
@file_options
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
        if models.n_ctx is not None:
            raise click.UsageError(
                "-c and --n-ctx both name the size of the context; drop one", click.get_current_context()
            )
        with refusing_values():
            models = replace(models, n_ctx=files.n_ctx)
    own_files = ConversationFiles()
    messages = own_files.load(files.load) if files.load is not None else None
    if files.resume:
        messages = load_last()
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
        if files.resume:
            say(f"going on with the last conversation: {len(session.messages)} messages")
        if decoding.seed is None:
            say(f"the seed is {seed}; --seed {seed} gives the same answers again")
        loop = ChatLoop(session, pair, own_files, save_to, files, replace(decoding, seed=seed), thoughts)
        try:
            loop.run()
        finally:
            keep_prior(pair, policy)
            keep_texts(pair)
