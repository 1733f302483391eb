"""From the conversation of a request to its prompt, and from prompts to jobs.

The chat APIs differ only in names: each maps its body to a `ChatRequest`. Text of a conversation never
becomes a control token; a prompt to continue may contain them, as in llama-server.
tests/serve/test_tools.py, tests/serve/test_thinking.py, tests/serve/test_beginnings.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from starlette.concurrency import run_in_threadpool

from llamaspec.chat.answer_stream import AnswerStream
from llamaspec.chat.families import HARMONY, JSON_CALL
from llamaspec.chat.infill import infill_prompt
from llamaspec.chat.messages import Message
from llamaspec.chat.notation import AnswerFormat
from llamaspec.chat.parse import AnswerParser
from llamaspec.chat.prompt import asked, begun_answer, render_prompt
from llamaspec.chat.template import RESERVED, ChatTemplate, texts_in
from llamaspec.drafters.fallback import NoDrafter
from llamaspec.engine.completion import Completion, StopReason
from llamaspec.engine.stream import Progress, TextStream
from llamaspec.errors import PromptError, TemplateError
from llamaspec.length.fixed import AtMost
from llamaspec.pair import Pair
from llamaspec.protocols import LengthPolicy
from llamaspec.sampling.acceptance_rules import DEFAULT_RULE
from llamaspec.sampling.filters import Sampling
from llamaspec.serve.bodies import AnswerOptions, GenerationBody, ReasoningOptions, check_token_ids
from llamaspec.serve.constraints import Constraints, Prompt, ResponseFormat
from llamaspec.serve.http_errors import ContextOverflowError, RequestError, bad_field, not_supported
from llamaspec.serve.message_fields import ToolUse
from llamaspec.serve.metrics import ModelMetrics
from llamaspec.serve.shown_pictures import shown
from llamaspec.values import TokenArray

USUAL_BYTES = 4  # of a token, to estimate the tokens of prompts that are too long to be tokenized


@dataclass(frozen=True, slots=True, eq=False)
class ChatRequest:
    """A conversation to answer, in the same form for every API."""

    messages: Sequence[Message]
    field: str  # the request's field with the messages, for errors
    tool_use: ToolUse
    reasoning: ReasoningOptions
    response_format: ResponseFormat | None = None
    left_out: Sequence[str] = ()  # unsupported parts of the conversation, for the log


@dataclass(frozen=True, slots=True, eq=False)
class Runner:
    """What runs the jobs of one model: the pair, how much it drafts, and what is counted for it."""

    pair: Pair
    policy: LengthPolicy
    metrics: ModelMetrics


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One sequence to generate."""

    runner: Runner
    prompt: Prompt
    sampling: Sampling
    seed: int
    max_tokens: int
    options: AnswerOptions
    prediction: TokenArray | None = None  # [m] int32, that the answer is expected to mostly repeat
    scope: str = field(default="", repr=False)  # whose prefixes and answers it may reuse

    def open(self, on_prefill: Progress) -> AnswerStream:
        """Return the stream of its answer; PromptError if the prompt does not fit."""
        pair, policy = self.runner.pair, self.runner.policy
        prompt, drafting, vocabulary = self.prompt, self.options.drafting, pair.target.vocabulary
        is_plain = drafting.enabled is False or drafting.max_draft == 0
        constraints = iter((prompt.constraint, prompt.constraint_after_cut))  # of the two parts

        def open_part(tokens: TokenArray, max_tokens: int) -> TextStream:
            return pair.stream(
                tokens,
                sampling=self.sampling,
                seed=self.seed,
                max_tokens=max_tokens,
                stops=self.options.stops,
                spelled=prompt.answer_format.spelled(vocabulary.controls),
                rule=drafting.rule or DEFAULT_RULE,
                policy=policy if drafting.max_draft is None else AtMost(drafting.max_draft, policy),
                drafter=NoDrafter() if is_plain else None,
                copies=drafting.ngram is not False,
                on_prefill=on_prefill,
                constraint=next(constraints),
                logprobs=self.options.n_logprobs,
                prediction=self.prediction,
                is_interactive=self.options.is_interactive,
                scope=self.scope,
            )

        parser = AnswerParser(prompt.answer_format, prompt.tools, thinking=prompt.starts_in_reasoning)
        budget = prompt.reasoning_budget
        return AnswerStream(prompt.tokens, self.max_tokens, open_part, parser, vocabulary, budget)


class RequestBuilder:
    """Makes the prompts and jobs of requests to one model; raises a RequestError if that is impossible.

    Without a chat template, only text can be continued. `sampling` and `reasoning_budget` hold for requests
    that give none.
    """

    def __init__(
        self,
        runner: Runner,
        template: ChatTemplate | None,
        sampling: Sampling | None,
        reasoning_budget: int | None,
    ) -> None:
        self._runner, target = runner, runner.pair.target
        self.sampling, self._reasoning_budget = sampling, reasoning_budget
        self.template, self.vocabulary = template, target.vocabulary
        self.answer_format = AnswerFormat() if template is None else template.answer_format
        self.takes_tools = template is not None and template.takes_tools
        # In some files <tool_call> is a control token, in others a user-defined one: `specials` has both.
        marks = {text.decode(errors="replace"): i for i, text in self.vocabulary.specials.items()}
        self.constraints = Constraints(runner.pair, marks)
        self._context_size = target.context_size

    @cached_property
    def _max_bytes(self) -> int:
        """Maximum number of bytes of a text that may fit. Takes a while, so it is computed when needed."""
        return self._context_size * max(map(len, map(self.vocabulary.text, range(self.vocabulary.size))))

    def tokenized(self, given: str | Sequence[int | str]) -> TokenArray:
        """Return the tokens of a text to continue, or of a list of texts and token ids.

        Editors and text frontends write the marks of a model themselves, and often the first one, too, which
        the tokenizer adds.
        """
        tokens: list[int] = []
        for part in [given] if isinstance(given, str) else given:
            if isinstance(part, int):
                tokens.append(part)
            elif part:
                self.check_size(part, "prompt")
                more = self.vocabulary.tokenize(part.encode(), add_special=not tokens, parse_special=True)
                tokens += more.tolist()
        if tokens[:2] == [self.vocabulary.bos] * 2:
            del tokens[0]
        check_token_ids(tokens, self.vocabulary, "prompt")
        return self._checked(np.array(tokens, dtype=np.int32), "prompt")

    def infill_tokens(self, prefix: str, suffix: str) -> TokenArray:
        """Return the prompt for the text between a prefix and a suffix."""
        self.check_size(prefix + suffix, "suffix")
        return self._checked(infill_prompt(self.vocabulary, prefix, suffix), "prompt")

    async def rendered(self, request: ChatRequest, *, must_fit: bool = True) -> Prompt:
        """Return the prompt of a conversation, without the constraints of its answer."""
        use, kwargs = request.tool_use, request.reasoning.template_kwargs
        if use.offered and not (self.takes_tools or use.is_forced):
            raise not_supported("tools", "this model's chat template takes no tools")
        if use.is_forced and not use.tools:
            raise bad_field("tool_choice", "needs a function among the tools")
        if use.is_named and use.choice not in {tool["function"]["name"] for tool in use.tools}:
            raise bad_field("tool_choice", "names no function among the tools; name one, or use auto")
        if taken := RESERVED.intersection(kwargs):
            names = ", ".join(sorted(taken))
            raise bad_field("chat_template_kwargs", f"the server sets {names}; remove it from the request")
        return await run_in_threadpool(self._render, request, must_fit)

    def _render(self, request: ChatRequest, must_fit: bool) -> Prompt:
        template, field, target = self.template, request.field, self._runner.pair.target
        projector = target.projector if target.projector is not None and target.projector.sees else None
        messages, pixels = shown(request.messages, sees=projector is not None)
        if template is None:
            remedy = "use /v1/completions, or start the server with --chat-template"
            raise RequestError(400, f"this model has no chat template; {remedy}", code="no_chat_template")
        tools, kwargs = request.tool_use.offered, request.reasoning.template_kwargs
        self.check_size("".join(texts_in([[each.as_dict() for each in messages], tools])), field)
        try:
            prompt = render_prompt(template, messages, tools, template_kwargs=kwargs)
        except TemplateError as error:
            place = template.refused_place(asked(messages), error, tools=tools, template_kwargs=kwargs)
            raise bad_field(place or field, str(error)) from error
        self.check_size(prompt.rendered.text, field)  # a template may write more than it was given
        if pixels and projector is not None:
            from llamaspec.chat.pictures import tokenize

            try:
                tokens, pictures = tokenize(prompt.rendered, pixels, projector, target.batch_size)
            except PromptError as error:
                raise bad_field(field, str(error)) from error
            tokens = self.vocabulary.begun(tokens)
        else:
            tokens, pictures = prompt.tokenize(self.vocabulary), ()
        tokens = self._checked(tokens, field) if must_fit else tokens
        return Prompt(tokens, self.answer_format, tools, prompt.is_thinking, pictures=pictures)

    def _checked(self, tokens: TokenArray, field: str) -> TokenArray:
        """Return a prompt; RequestError if it is empty or does not fit the context."""
        if len(tokens) == 0:
            raise bad_field(field, "must not be empty")
        if len(tokens) >= self._context_size:
            raise ContextOverflowError(len(tokens), self._context_size, field)
        return tokens

    def check_size(self, text: str | bytes, field: str) -> None:
        """Raise a RequestError if a text is certain to exceed the context; does not tokenize it."""
        n = len(text.encode() if isinstance(text, str) else text)
        if n > self._context_size and n > self._max_bytes:  # a token has at least one byte
            n_tokens = max(n // USUAL_BYTES, self._context_size)
            raise ContextOverflowError(n_tokens, self._context_size, field, is_estimate=True)

    async def chat(self, request: ChatRequest) -> Prompt:
        """Return the prompt of a conversation."""
        use, wanted = request.tool_use, request.response_format
        answer_format = self.answer_format
        if use.is_forced and (answer_format.calls is None or not self.takes_tools):
            answer_format = replace(answer_format, calls=JSON_CALL)
        is_begun = bool(begun_answer(request.messages).text)  # its reasoning is over
        budget = self._reasoning_budget if request.reasoning.budget is None else request.reasoning.budget
        budget = 0 if is_begun else budget
        prompt = replace(await self.rendered(request), answer_format=answer_format, reasoning_budget=budget)
        has_channels = answer_format.calls is HARMONY
        if wanted is not None:
            if use.offered:
                raise not_supported(wanted.field, "cannot be combined with tools")
            if is_begun:
                raise not_supported(wanted.field, "cannot be combined with a last message of the assistant")
            return await self.constraints.with_format(prompt, wanted)
        if is_begun and has_channels:
            if use.is_forced:
                raise not_supported("tool_choice", "cannot be combined with a last message of the assistant")
            return prompt
        return await self.constraints.with_tools(prompt, use) if use.offered else prompt

    async def continued(self, texts: Sequence[TokenArray], wanted: ResponseFormat | None) -> list[Prompt]:
        """Return the prompts for texts to continue."""
        constraint = None if wanted is None else await self.constraints.compile(wanted)
        return [Prompt(tokens, constraint=constraint) for tokens in texts]

    async def jobs(self, prompts: Sequence[Prompt], body: GenerationBody, scope: str = "") -> list[Job]:
        """Return one job for each prompt and choice, which reuse only what the scope may know."""
        options = body.chosen_options
        biases = await run_in_threadpool(body.biases, self.vocabulary)
        check_token_ids(list(biases), self.vocabulary, "logit_bias")
        sampling = body.sampling(biases, self.sampling)
        limit = self._context_size if options.limit is None or options.limit < 0 else options.limit
        prediction = None
        if options.prediction is not None:
            prediction = await run_in_threadpool(self._predicted, options.prediction)
        return [
            Job(
                self._runner,
                prompt,
                sampling,
                options.seed + i,
                max_tokens=min(limit, self._context_size - len(prompt.tokens)),
                options=options,
                prediction=prediction,
                scope=scope,
            )
            for prompt in prompts
            for i in range(options.n)
        ]

    def _predicted(self, text: str) -> TokenArray:
        """Return the tokens of a prediction, without those that cannot fit."""
        fitting = text if len(text) <= self._context_size else text[: self._max_bytes]
        return self.vocabulary.tokenize(fitting.encode(), add_special=False)

    def matched_stop(self, completion: Completion, stops: Sequence[str]) -> str | None:
        """Return the stop string that ended a completion; None if none did."""
        if completion.stop_reason is not StopReason.STOP:
            return None
        spelled = self.answer_format.spelled(self.vocabulary.controls)
        pieces = (spelled.get(token) or self.vocabulary.piece(token) for token in completion.tokens)
        written = b"".join(pieces).decode(errors="replace")
        return next((stop for stop in stops if written.startswith(stop, len(completion.text))), None)
