// The page: a chat over the server's own API. No library, no build. Whatever comes from a model or a file
// goes into the document as text, never as HTML.

import { format } from "./markdown.js";
import { draw, conclude } from "./timeline.js";

const $ = (id) => document.getElementById(id);
const KEPT = ["system", "temperature", "seed", "max-tokens", "theme", "markdown", "tint"];
const STORE = "llamaspec";

let messages = []; // {role, content, ...}: what the server is asked with
let running = null; // AbortController of the answer that is being written
let last = null; // {seed, text, speed, drafting} of the last complete answer

const headers = () => ({
  "Content-Type": "application/json",
  ...($("key").value ? { Authorization: `Bearer ${$("key").value}` } : {}),
});

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

// ---- settings and what survives a reload -----------------------------------------------------------------

function keep() {
  const settings = {};
  for (const id of KEPT) settings[id] = $(id).type === "checkbox" ? $(id).checked : $(id).value;
  try {
    localStorage.setItem(STORE, JSON.stringify({ settings, messages }));
  } catch {
    // A full or forbidden store: the page works without.
  }
}

function restore() {
  let kept = null;
  try {
    kept = JSON.parse(localStorage.getItem(STORE));
  } catch {
    kept = null;
  }
  for (const [id, value] of Object.entries(kept?.settings ?? {})) {
    if (!KEPT.includes(id)) continue;
    if ($(id).type === "checkbox") $(id).checked = Boolean(value);
    else $(id).value = String(value);
  }
  const isMessage = (m) => ["user", "assistant"].includes(m?.role) && typeof m.content === "string";
  messages = Array.isArray(kept?.messages) ? kept.messages.filter(isMessage) : [];
  for (const message of messages) show(message.role, message.content);
  settle();
}

function settle() {
  document.documentElement.dataset.theme = $("theme").value;
  document.body.classList.toggle("no-tint", !$("tint").checked);
}

// ---- the conversation ------------------------------------------------------------------------------------

function show(role, text = "") {
  const article = element("article", role);
  article.append(element("h2", "", role === "user" ? "You" : "Model"));
  const body = element("div", "text", text);
  article.append(body);
  $("conversation").append(article);
  if (role !== "user" && text) dress(body, text);
  article.scrollIntoView({ block: "end" });
  return { article, body };
}

function dress(body, text) {
  if (!$("markdown").checked) return;
  body.classList.add("formatted");
  body.replaceChildren(...format(text));
}

function append(body, text, drafted) {
  const latest = body.lastChild;
  if (latest && latest.classList?.contains("drafted") === Boolean(drafted)) latest.textContent += text;
  else body.append(element("span", drafted ? "drafted" : "plain", text));
}

function problem(text) {
  $("problem").textContent = text;
}

async function* events(response) {
  const decoder = new TextDecoder();
  const reader = response.body.getReader(); // not every browser iterates over a body
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + decoder.decode(value, { stream: true })).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.startsWith("data: ") ? line.slice(6).trim() : "";
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function message(response) {
  try {
    const { error } = await response.json();
    return typeof error === "string" ? error : error.message;
  } catch {
    return `the server answers ${response.status}`;
  }
}

// Ask for the answer to `asked` and show it as it comes. Returns null where nothing was said.
async function answer(asked, { drafting, seed }) {
  const body = {
    model: $("model").textContent,
    messages: [...($("system").value ? [{ role: "system", content: $("system").value }] : []), ...asked],
    temperature: Number($("temperature").value),
    max_tokens: Number($("max-tokens").value),
    seed,
    stream: true,
    stream_options: { include_usage: true },
    speculative: { enabled: drafting, spans: true, rounds: true },
  };
  running = new AbortController();
  busy(true);
  const { article, body: place } = show("assistant");
  place.setAttribute("aria-live", "polite");
  let text = "";
  let reasoning = null;
  let first = 0;
  let nEvents = 0;
  let end = null;
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: headers(),
      body: JSON.stringify(body),
      signal: running.signal,
    });
    if (!response.ok) throw new Error(await message(response));
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      const delta = event.choices?.[0]?.delta;
      if (delta?.reasoning_content) {
        if (!reasoning) {
          const fold = element("details");
          fold.append(element("summary", "", "Reasoning"), (reasoning = element("div")));
          article.insertBefore(fold, place);
        }
        reasoning.textContent += delta.reasoning_content;
      }
      if (delta?.content) {
        first ||= performance.now();
        const spans = event.spans ?? [{ text: delta.content, drafted: false }];
        for (const span of spans) append(place, span.text, span.drafted);
        text += delta.content;
        nEvents += spans.length;
        const seconds = (performance.now() - first) / 1000;
        if (seconds > 0.3) $("speed").textContent = `${(nEvents / seconds).toFixed(1)} pieces/s`;
        $("last").hidden = false;
        $("conversation").scrollTop = $("conversation").scrollHeight;
      }
      if (event.timings) end = event;
    }
  } catch (error) {
    if (error.name !== "AbortError") problem(error.message || "the server does not answer");
  } finally {
    running = null;
    busy(false);
    place.removeAttribute("aria-live");
  }
  if (!text && !reasoning) {
    article.remove();
    return null;
  }
  dress(place, text);
  return { article, text, seed, drafting, timings: end?.timings, rounds: end?.rounds ?? [] };
}

function busy(isBusy) {
  $("send").disabled = $("again").disabled = isBusy;
  $("stop").hidden = !isBusy;
  if (isBusy) problem("");
}

function figures(made) {
  const { timings } = made;
  if (!timings) return;
  const speed = `${timings.predicted_per_second.toFixed(1)} tokens/s`;
  const estimate = timings.speedup_estimate;
  const gain = made.drafting && estimate ? `, ${estimate.toFixed(2)} times as fast as without a draft` : "";
  const told = `${speed}${gain}${made.drafting ? "" : " without the draft"}`;
  made.article.append(element("p", "figures", told));
  $("speed").textContent = "";
  draw($("timeline"), made.rounds);
  $("conclusion").textContent = conclude(made.rounds, timings);
  $("last").hidden = !made.rounds.length;
}

async function send(text) {
  const drafting = $("drafting").checked;
  const asked = [...messages, { role: "user", content: text }];
  const { article } = show("user", text);
  const seed = Number($("seed").value) + asked.length - 1;
  const made = await answer(asked, { drafting, seed });
  $("drafting").checked = true;
  if (!made) {
    article.remove();
    $("message").value ||= text;
    return;
  }
  messages = [...asked, { role: "assistant", content: made.text }];
  figures(made);
  last = made;
  offerAgain();
  keep();
}

// The last answer once more, the other way: the same seed gives the same text.
async function again() {
  const before = last;
  const made = await answer(messages.slice(0, -1), { drafting: !before.drafting, seed: before.seed });
  if (!made) return;
  figures(made);
  const speeds = [before, made].map((one) => one.timings?.predicted_per_second);
  const isSame = made.text === before.text;
  const ratio = speeds[0] && speeds[1] ? speeds[made.drafting ? 1 : 0] / speeds[made.drafting ? 0 : 1] : null;
  const verdict = isSame ? "The same text" : "Another text (one of the two was stopped, or widths differ in rounding)";
  made.article.append(
    element("p", "figures", `${verdict}${ratio ? `; with the draft ${ratio.toFixed(2)} times as fast` : ""}.`),
  );
  last = { ...made, text: before.text };
  offerAgain();
}

function offerAgain() {
  $("again").hidden = !last;
  $("again").textContent = last?.drafting ? "Again without the draft" : "Again with the draft";
}

function clear() {
  messages = [];
  last = null;
  $("conversation").replaceChildren();
  $("last").hidden = true;
  offerAgain();
  keep();
  $("message").focus();
}

// ---- what the server does --------------------------------------------------------------------------------

async function look() {
  if (document.hidden) return;
  try {
    const response = await fetch("props", { headers: headers() });
    if (!response.ok) throw new Error(await message(response));
    const props = await response.json();
    $("model").textContent = props.model_alias;
    const lengths = Object.entries(props.speculative?.draft_length_by_rows ?? {});
    const told = lengths.map(([rows, k]) => `${k.toFixed(1)} for ${rows}`).join(", ");
    const { running: nRunning, waiting } = props.rows ?? { running: 0, waiting: 0 };
    const count = `${nRunning} of ${props.total_slots} running${waiting ? `, ${waiting} waiting` : ""}`;
    $("load").textContent = told ? `${count}; draft tokens by texts at once: ${told}` : count;
  } catch (error) {
    $("load").textContent = error.message;
  }
}

// ---- wiring ----------------------------------------------------------------------------------------------

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("message").value;
  if (running || !text.trim()) return;
  $("message").value = "";
  send(text);
});
$("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("form").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
$("stop").addEventListener("click", () => running?.abort());
$("again").addEventListener("click", again);
$("clear").addEventListener("click", clear);
$("open-settings").addEventListener("click", () => {
  $("settings").hidden = !$("settings").hidden;
  $("open-settings").setAttribute("aria-expanded", String(!$("settings").hidden));
});
for (const id of KEPT) {
  $(id).addEventListener("change", () => {
    settle();
    keep();
  });
}
$("key").addEventListener("change", look);
restore();
look();
setInterval(look, 3000);
