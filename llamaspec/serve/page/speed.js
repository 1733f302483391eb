// What the timings of an answer mean, in words.

const compared = (factor) => (factor < 1 ? `${Math.round(100 * (1 - factor))}% slower than` : `${factor.toFixed(1)}× as fast as`);
export const rate = (timings) => `${timings.predicted_per_second.toFixed(1)} tokens/s`;

// Times as fast as without a draft; null: not known.
function gain({ draft_n: nDrafted, speedup_estimate: estimate }) {
  return nDrafted && estimate ? estimate : null;
}

// The claim: how fast, next to decoding without a draft. The estimate is not worth more than a tenth.
export function claim(timings) {
  const factor = gain(timings);
  if (!timings.predicted_per_second) return "";
  if (!factor) return rate(timings);
  if (Math.abs(factor - 1) < 0.1) return "About as fast as without a draft (estimate)";
  return `${compared(factor)} without a draft (estimate)`;
}

export const isGain = (timings) => gain(timings) >= 1.1;

// The reason, in a sentence.
export function reason(timings) {
  const { draft_n: nDrafted, draft_n_accepted: nAccepted, copied } = timings;
  if (!nDrafted) return unused(timings) ?? "Nothing was drafted, because no gain was expected.";
  const areCopies = copied?.drafted === nDrafted;
  const right = areCopies
    ? `${nAccepted} of ${nDrafted} tokens copied from earlier text were accepted`
    : `${nAccepted} of ${nDrafted} draft tokens were accepted${copied?.accepted ? `, ${copied.accepted} of them copies of earlier text` : ""}`;
  const factor = gain(timings);
  if (factor && factor <= 0.9) return `Only ${right}: drafting cost more than it saved.`;
  return `${right}, so the model generated ${timings.predicted_n} tokens in ${timings.rounds} steps.`;
}

// Why the draft model was not used, or no more; null where it was.
function unused({ draft_fault: fault, unused_draft: unread }) {
  if (fault) return `The draft model failed and is no longer used: ${fault}.`;
  if (!unread) return null;
  const { reading_seconds: reading, saved_seconds: saved } = unread;
  if (saved < 0.05) return "The draft model was not used, because no gain was expected.";
  return (
    `The draft model was not used: processing the prompt would have taken ${reading.toFixed(1)} s, ` +
    `to save about ${saved.toFixed(1)} s.`
  );
}

// Milliseconds as people read them.
export const seconds = (ms) => `${(ms / 1000).toFixed(ms < 10000 ? 2 : 1)} s`;

// Where the time went.
export function account(timings) {
  const cached = timings.cache_n ? `; ${timings.cache_n} from cache` : "";
  const factor = gain(timings);
  const why = timings.draft_n ? unused(timings) : null;
  const plain = factor ? ` Without a draft it would have taken about ${seconds(timings.predicted_ms * factor)}.` : "";
  return (
    `Read ${timings.prompt_n} ${timings.prompt_n === 1 ? "token" : "tokens"} of the prompt in ${seconds(timings.prompt_ms)}${cached}. ` +
    `Generated ${timings.predicted_n} in ${seconds(timings.predicted_ms)}, ${rate(timings)}.${plain}` +
    (why ? ` ${why}` : "")
  );
}

// The same answer with and without the draft, as measured.
export function comparison(timings, plain, isSame) {
  const factor = timings.predicted_per_second / plain.predicted_per_second;
  const text = isSame ? "The text is the same." : "The text differs: larger batches may round differently; the server's --exact prevents that.";
  return `Measured: ${rate(timings)} with the draft, ${compared(factor)} the ${rate(plain)} without it. ${text}`;
}
