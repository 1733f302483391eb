// The timings of an answer in words.

const compared = (factor) => (factor < 1 ? `${Math.round(100 * (1 - factor))}% slower than` : `${factor.toFixed(1)}× as fast as`);
export const rate = (timings) => `${timings.predicted_per_second.toFixed(1)} tokens/s`;

// The speed-up over decoding without a draft; null if it is not known.
function gain({ draft_n: nDrafted, speedup_estimate: estimate }) {
  return nDrafted && estimate ? estimate : null;
}

// How fast an answer was, compared to decoding without a draft. The estimate is good to about a tenth.
export function claim(timings) {
  const factor = gain(timings);
  if (!timings.predicted_per_second) return "";
  if (!factor) return rate(timings);
  if (Math.abs(factor - 1) < 0.1) return "About as fast as without a draft (estimate)";
  return `${compared(factor)} without a draft (estimate)`;
}

export const isGain = (timings) => gain(timings) >= 1.1;

// Why it was that fast, in one sentence.
export function reason(timings) {
  const { draft_n: nDrafted, draft_n_accepted: nAccepted, copied } = timings;
  if (!nDrafted) return unused(timings) ?? "Nothing was drafted, because no gain was expected.";
  const areCopies = copied?.drafted === nDrafted;
  const right = areCopies
    ? `${nAccepted} of ${nDrafted} tokens copied from earlier text were accepted`
    : `${nAccepted} of ${nDrafted} draft tokens were accepted${copied?.accepted ? `, ${copied.accepted} of them copies of earlier text` : ""}`;
  const factor = gain(timings);
  if (factor && factor <= 0.9) return `Only ${right}: drafting took more time than it saved.`;
  return `${right}, so the model generated ${timings.predicted_n} tokens in ${timings.rounds} steps.`;
}

// Why the draft model was not used to the end; null if it was.
function unused({ draft_fault: fault, unused_draft: unusedDraft }) {
  if (fault) return `The draft model failed and is no longer used: ${fault}.`;
  if (!unusedDraft) return null;
  const { reading_seconds: processing, saved_seconds: saved } = unusedDraft;
  if (saved < 0.05) return "The draft model was not used, because no gain was expected.";
  return (
    `The draft model was not used: it would have taken ${processing.toFixed(1)} s to process the prompt, ` +
    `and saved about ${saved.toFixed(1)} s.`
  );
}

// A time in milliseconds, shown in seconds.
export const seconds = (ms) => `${(ms / 1000).toFixed(ms < 10000 ? 2 : 1)} s`;

// What plain decoding would have cost, at the depth of this answer.
function price({ prompt_n: prompt, cache_n: cached, predicted_n: generated }, ms) {
  const depth = Math.round(prompt + cached + generated / 2).toLocaleString("en");
  return `Without a draft it would have taken about ${seconds(ms)}: ${(ms / generated).toFixed(0)} ms a token behind ${depth} others.`;
}

// How the time of an answer was spent.
export function account(timings) {
  const cached = timings.cache_n ? `; ${timings.cache_n} more were cached` : "";
  const factor = gain(timings);
  const why = timings.draft_n ? unused(timings) : null;
  const plain = factor ? ` ${price(timings, timings.predicted_ms * factor)}` : "";
  return (
    `Processed ${timings.prompt_n} prompt ${timings.prompt_n === 1 ? "token" : "tokens"} in ${seconds(timings.prompt_ms)}${cached}. ` +
    `Generated ${timings.predicted_n} in ${seconds(timings.predicted_ms)}, ${rate(timings)}.${plain}` +
    (why ? ` ${why}` : "")
  );
}

// The speed of the same answer with and without the draft, as measured.
export function comparison(timings, plain, isSame) {
  const factor = timings.predicted_per_second / plain.predicted_per_second;
  const text = isSame ? "The text is the same." : "The text differs, because larger batches may round differently here; llamaspec audit shows why.";
  return `Measured: ${rate(timings)} with the draft, ${compared(factor)} the ${rate(plain)} without it. ${text}`;
}
