// Receives answers: what to send for them, and what to show meanwhile.

import { chat } from "./client.js";
import { fenced } from "./files.js";

const COPIES = ["ngram", "prediction", "earlier"]; // sources of draft tokens that are copied
const SHORT = 500; // milliseconds after which tokens per second mean something

// Returns the messages to send: with attached files, and with roles that alternate. The model continues an answer at the end.
export function conversation(messages, system) {
  const sent = system ? [{ role: "system", content: system }] : [];
  for (const message of messages) {
    const { role, content, reasoning, files = [] } = message;
    const text = [content, ...files.map(fenced)].filter(Boolean).join("\n\n");
    if (!text && !(reasoning && message === messages.at(-1))) continue;
    if (sent.at(-1)?.role === role) sent.at(-1).content += `\n\n${text}`;
    else sent.push({ role, content: text, ...(reasoning && { reasoning_content: reasoning }) });
  }
  return sent;
}

// Adds an answer to `into`. Calls `tell` with {status, …} for each event. Returns the last chunk, which has the timings.
export async function receive(into, request, key, signal, tell) {
  let end = null;
  let begin = 0; // milliseconds, of the first text
  let n = 0; // tokens since then
  for await (const chunk of chat(request, key, signal)) {
    const { content, reasoning_content: reasoning } = chunk.choices?.[0]?.delta ?? {};
    if (reasoning) into.reasoning = (into.reasoning ?? "") + reasoning;
    if (content) {
      into.content += content;
      (into.spans ??= []).push(...(chunk.spans ?? []));
    }
    if (content || reasoning) {
      if (begin) n += chunk.n_tokens;
      begin ||= performance.now();
      tell({ status: soFar(n, performance.now() - begin), isGenerating: true });
    } else if (chunk.loading) tell({ status: `Loading ${chunk.loading}…`, isLoading: true });
    else if (chunk.waiting) tell({ status: "Waiting for other requests…" });
    else if (chunk.of) tell({ ...chunk, status: `Processing the prompt: ${chunk.processed} of ${chunk.of} tokens` });
    else if (chunk.working && !begin) tell({ status: "Processing the prompt…" });
    if (chunk.timings) end = chunk;
  }
  return end;
}

const soFar = (n, ms) => (ms < SHORT ? "" : `${((1000 * n) / ms).toFixed(1)} tokens/s`);

// Counts the draft tokens that were copied.
export function copied(rounds) {
  const copies = rounds.filter(({ source }) => COPIES.includes(source));
  const sum = (name) => copies.reduce((total, round) => total + round[name], 0);
  return { drafted: sum("drafted"), accepted: sum("accepted") };
}

// Returns a function that calls `paint` at most once a frame, and never for more than a third of the time.
export function painter(paint) {
  let isDue = false;
  let rest = 0; // milliseconds
  return () => {
    if (isDue) return;
    isDue = true;
    setTimeout(() => {
      isDue = false;
      const begin = performance.now();
      paint();
      rest = Math.max(16, 2 * (performance.now() - begin));
    }, rest);
  };
}
