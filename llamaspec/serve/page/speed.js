// What the timings of an answer mean, in words.

const times = (factor) => `${factor.toFixed(factor < 0.95 ? 2 : 1)}×`;
export const rate = (timings) => `${timings.predicted_per_second.toFixed(1)} tokens/s`;

// The claim: how fast, next to decoding without a draft.
export function claim(timings) {
  const factor = timings.draft_n ? timings.speedup_estimate : null;
  if (!timings.predicted_per_second) return "";
  if (!factor) return rate(timings);
  if (Math.abs(factor - 1) < 0.05) return "As fast as without a draft";
  return `${times(factor)} as fast as without a draft`;
}

// The reason, in a sentence or two.
export function reason(timings) {
  const { draft_n: nDrafted, draft_n_accepted: nAccepted, unused_draft: unused } = timings;
  const told = [];
  if (nDrafted) {
    const copied = timings.copied ? `, ${timings.copied} of them copied from earlier text` : "";
    const right = `${nAccepted} of ${nDrafted} draft tokens were right${copied}`;
    const isSlower = timings.speedup_estimate && timings.speedup_estimate < 0.95;
    if (isSlower) told.push(`Only ${right}: drafting took longer than it saved.`);
    else told.push(`${right}, so the model wrote ${timings.predicted_n} tokens in ${timings.rounds} steps.`);
  }
  if (unused) {
    const [reading, saved] = [unused.reading_seconds, unused.saved_seconds].map((seconds) => `${seconds.toFixed(1)} s`);
    told.push(`The draft model was not used: it would have taken ${reading} to read the prompt, and was expected to save ${saved}.`);
  }
  return told.join(" ") || "Nothing was drafted, because no gain was expected.";
}

// Where the time went.
export function account(timings) {
  const seconds = (ms) => `${(ms / 1000).toFixed(ms < 10000 ? 2 : 1)} s`;
  const cached = timings.cache_n ? ` (${timings.cache_n} more were known)` : "";
  const plain = timings.speedup_estimate
    ? ` Without a draft it would have taken about ${seconds(timings.predicted_ms * timings.speedup_estimate)}.`
    : "";
  return (
    `Read ${timings.prompt_n} tokens of the prompt in ${seconds(timings.prompt_ms)}${cached}. ` +
    `Wrote ${timings.predicted_n} in ${seconds(timings.predicted_ms)}, ${rate(timings)}.${plain}`
  );
}

// The same answer with and without the draft, as measured.
export function comparison(timings, plain, isSame) {
  const factor = timings.predicted_per_second / plain.predicted_per_second;
  const text = isSame ? "The text is the same." : "The text differs, because sums of another width are rounded differently.";
  return `Measured: ${rate(plain)} without the draft, so it is ${times(factor)} as fast with it. ${text}`;
}
