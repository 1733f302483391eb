// The timings of an answer in words.

const SAME = 0.03; // speed-ups that differ less from 1 are noise, as in measure/verdict.py
export const rate = (timings) => `${timings.predicted_per_second.toFixed(1)} tokens/s`;

// A speed-up in the words of the commands and of the log (`gain_in_words`).
function compared(factor) {
  const percent = Math.round(100 * Math.abs(factor - 1));
  if (Math.abs(factor - 1) < SAME) return "about as fast as";
  if (factor < 1.1) return `${percent}% ${factor < 1 ? "slower" : "faster"} than`;
  return `${factor.toFixed(1)} times as fast as`;
}

// The estimated speed-up over decoding without drafts; null if it is not known.
function gain({ draft_n: nVerified, speedup_estimate: estimate }) {
  return nVerified && estimate ? estimate : null;
}

// How fast an answer was, compared with decoding without drafts.
export function claim(timings) {
  const factor = gain(timings);
  if (!timings.predicted_per_second) return "";
  if (!factor) return rate(timings);
  return `${rate(timings)}, ${compared(factor)} without drafts (estimate)`;
}

export const isGain = (timings) => gain(timings) >= 1 + SAME;

// Why it was that fast, in one sentence.
export function reason(timings) {
  const { draft_n: nVerified, draft_n_accepted: nAccepted, copied } = timings;
  if (!nVerified) return unused(timings) ?? "No draft token was verified, because none was expected to save time.";
  const areCopies = copied?.drafted === nVerified;
  const copies = areCopies ? ", all copied" : copied?.accepted ? `, ${copied.accepted} of them copied` : "";
  const right = `${nAccepted} of ${nVerified} draft tokens were accepted${copies}`;
  if (gain(timings) && gain(timings) <= 1 - SAME) return `Only ${right}: drafting took more time than it saved.`;
  return `${right}, so ${timings.predicted_n} tokens took ${timings.rounds} evaluations of the model.`;
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
  return `Without drafts it would have taken about ${seconds(ms)}: ${(ms / generated).toFixed(0)} ms a token behind ${depth} others.`;
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

// The speed of the same answer with drafts and without, as measured.
export function comparison(timings, plain, isSame) {
  const factor = timings.predicted_per_second / plain.predicted_per_second;
  const text = isSame ? "The text is the same." : "The text differs, because larger batches may round differently here; llamaspec audit shows why.";
  return `Measured: ${rate(timings)} with drafts, ${compared(factor)} the ${rate(plain)} without. ${text}`;
}
