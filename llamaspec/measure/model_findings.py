"""What a doctor says of each of two models, and of both together, from measured facts.

Loads, measures and prints nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.filesize import decimal

from llamaspec.llama.facts import ModelFacts
from llamaspec.llama.options import CACHE_BYTES
from llamaspec.llama.vocabulary import LlamaVocabulary
from llamaspec.measure.findings import OK, WARNING, Examined, Finding, Machine

CHEAP = 3.0  # a draft should be at least so many times cheaper than its target


def model_findings(machine: Machine, model: Examined) -> Iterator[Finding]:
    """What is to say of one model alone."""
    yield Finding(OK, model.role, f"{model.name}: {model.description}, {_parameters(model.facts)}")
    context = f"{model.context_size} tokens used, trained on {model.trained_context_size}"
    asked = model.options.n_ctx
    if asked is not None and asked > model.trained_context_size:
        yield Finding(
            WARNING,
            f"{model.role} context",
            f"{context}: its text may break down beyond that",
            f"open {model.trained_context_size} tokens or less",
            (f"{model.role}.n_ctx",),
        )
    else:
        yield Finding(OK, f"{model.role} context", context)
    yield _rollback_finding(model)
    yield _cache_finding(model)
    on_gpu = machine.offloads(model.options) or model.options.workers != ()
    yield _flash_finding(model, on_gpu=on_gpu)


def _rollback_finding(model: Examined) -> Finding:
    """What the KV cache did when draft tokens were taken back."""
    facts, memory = model.facts, model.memory
    kind = "states and positions" if facts.keeps_states and facts.keeps_positions else "positions"
    if not facts.keeps_positions:
        kind = "states"
    if facts.window is not None:
        kind += f", some layers see the last {facts.window}"
    topic = f"{model.role} rollback"
    if memory.n_reread == 0:
        how = "to an earlier state in the cache" if facts.keeps_states else "by removing just them"
        return Finding(OK, topic, f"keeps {kind}; rejected draft tokens are taken back {how}")
    if memory.n_kept > 0:
        again = f"{memory.n_reread} of {memory.n_right} tokens were evaluated again in a trial"
        size, cost = decimal(memory.snapshot_bytes), f"{1e3 * memory.snapshot_seconds:.1f} ms"
        how = f"from a snapshot ({size}, {cost} to copy and put back), {again}"
        return Finding(OK, topic, f"keeps {kind}; rejected draft tokens are taken back {how}")
    return Finding(
        WARNING,
        topic,
        f"keeps {kind}; it cannot go back, so after a rejected draft token the whole text is evaluated again",
        "keep texts short, decode plainly, or choose a model that keeps positions only",
        ("draft_length",),
    )


def _cache_finding(model: Examined) -> Finding:
    types, topic = (model.options.cache_type_k, model.options.cache_type_v), f"{model.role} KV types"
    text = f"keys {types[0]}, values {types[1]}"
    if model.role == "draft" and min(CACHE_BYTES[kind] for kind in types) < CACHE_BYTES["q8_0"]:
        return Finding(
            WARNING,
            topic,
            f"{text}: below q8_0 draft tokens get worse",
            "raise both to q8_0 or f16",
            ("draft.cache_type_k", "draft.cache_type_v"),
        )
    return Finding(OK, topic, text)


def _flash_finding(model: Examined, *, on_gpu: bool) -> Finding:
    """On CPUs attention without it may be the faster: no reason to warn."""
    asked, topic = model.options.flash_attention, f"{model.role} flash attention"
    if not model.facts.keeps_positions:
        return Finding(OK, topic, "not needed, there is no attention")
    if asked == "off" and on_gpu:
        remedy = "leave it on"
        return Finding(
            WARNING,
            topic,
            "off: long contexts are slower and larger",
            remedy,
            (f"{model.role}.flash_attention",),
        )
    text = asked or "auto"
    if asked == "auto" and model.flash_attention is not None:
        text = f"auto: {'on' if model.flash_attention else 'off, not possible here'}"
    return Finding(OK, topic, text)


def pace_findings(target: Examined, draft: Examined) -> Iterator[Finding]:
    """Whether the draft is cheap enough for its target."""
    ratio = target.step_seconds / draft.step_seconds
    text = (
        f"a token takes {1e3 * target.step_seconds:.2f} ms in the target, "
        f"{1e3 * draft.step_seconds:.2f} ms in the draft: {ratio:.1f} times cheaper"
    )
    if ratio >= CHEAP:
        yield Finding(OK, "draft cost", text)
    else:
        yield Finding(
            WARNING,
            "draft cost",
            f"{text}, {CHEAP:.0f} times are wanted",
            "choose a smaller draft, or a larger target; a comparison shows whether drafting pays",
        )
    if target.facts.n_active_parameters is None:
        return
    text = (
        f"the target uses {_count(target.facts.n_computing)} parameters for a token, "
        f"the draft {_count(draft.facts.n_computing)}"
    )
    if target.facts.n_computing < CHEAP * draft.facts.n_computing:
        yield Finding(WARNING, "experts", f"{text}: too near", "choose a smaller draft")
    else:
        yield Finding(OK, "experts", text)


def vocabulary_findings(target: LlamaVocabulary, draft: LlamaVocabulary) -> Iterator[Finding]:
    """Of two that number the same tokens: whether both begin and end a text alike."""
    sizes = f"{target.size} tokens"
    if target.size != draft.size:
        sizes = f"{target.size} tokens in the target, {draft.size} in the draft, those of both equal"
    yield Finding(OK, "vocabulary", f"the same: {sizes}")
    differing = [
        f"{name} is {_token(mine)} in the target and {_token(its)} in the draft"
        for name, mine, its in (
            ("the start of a text", target.bos, draft.bos),
            ("the end of a text", target.eos, draft.eos),
        )
        if mine != its
    ]
    if differing:
        yield Finding(
            WARNING,
            "special tokens",
            "; ".join(differing) + ": draft tokens there are wrong",
            "choose a draft tuned like the target, both for chat or neither",
        )
    else:
        yield Finding(OK, "special tokens", f"start {_token(target.bos)}, end {_token(target.eos)} in both")


def _token(token: int) -> str:
    return "none" if token < 0 else f"token {token}"


def _parameters(facts: ModelFacts) -> str:
    text = f"{_count(facts.n_parameters)} parameters"
    if facts.n_active_parameters is None:
        return text
    return f"{text}, about {_count(facts.n_active_parameters)} of them active"


def _count(n: int) -> str:
    return f"{n / 1e9:.2f} billion" if n >= 1e8 else f"{n / 1e6:.2f} million"
