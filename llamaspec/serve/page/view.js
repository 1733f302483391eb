// Shows messages. `update` shows a message as it is now, also while it is being generated.

import { button, copyButton, element } from "./dom.js";
import { render } from "./markdown.js";
import { account, claim, isGain, reason } from "./speed.js";
import { draw } from "./timeline.js";

export function userView(message, { edit, turn }) {
  const article = element("article", "user");
  const change = button("Edit", openEditor, "idle-only");
  const tools = element("div", "tools", ...arrows(message, turn), change, copyButton(() => message.content));
  const text = element("div", "text");
  const body = () => [text, ...(message.files ?? []).map(attached), tools];
  const heading = element("h2", "hidden", "You");

  function update() {
    render(text, message.content);
    article.replaceChildren(heading, ...body());
  }

  function openEditor() {
    const area = element("textarea", "", message.content);
    area.value = message.content;
    area.setAttribute("aria-label", "Edited message");
    const send = () => area.value.trim() && edit(area.value);
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        update();
      } else if (isEnter(event)) {
        event.preventDefault();
        send();
      }
    });
    const hint = element("span", "faint", "This begins another version.");
    const choices = element("div", "tools", hint, button("Cancel", update), button("Send", send, "primary"));
    article.replaceChildren(heading, area, choices);
    grow(area);
    area.addEventListener("input", () => grow(area));
    area.focus();
  }
  update();
  return { article, update };
}

// Returns the arrows between the versions of a message; nothing if there is only one.
function arrows({ versions }, turn) {
  if (!versions) return [];
  const [back, forth] = [button("‹", () => turn(-1)), button("›", () => turn(1))];
  back.setAttribute("aria-label", "Previous version");
  forth.setAttribute("aria-label", "Next version");
  return [element("span", "versions idle-only", back, `${versions.indexOf(null) + 1}/${versions.length}`, forth)];
}

function attached({ name, text }) {
  return element("details", "file", element("summary", "", `${name}, ${size(text)}`), element("pre", "", text));
}

export function answerView(message, { again, more, compare, turn }) {
  const reasoning = fold("reasoning", "Reasoning", element("div", "plain"));
  const text = element("div", "text");
  const status = element("p", "status");
  const bar = element("progress");
  const error = element("p", "error");
  error.setAttribute("role", "alert");
  const notes = element("p", "notes");
  const how = fold("how", "", element("p"), chart(), element("div", "plain"));
  how.addEventListener("toggle", () => how.open && explain(how, message));
  const proceed = button("Continue", more, "idle-only last-only");
  const retry = button("Regenerate", again, "idle-only last-only");
  const plain = button("Compare without drafts", compare, "idle-only last-only");
  const copy = copyButton(() => message.content);
  const tools = element("div", "tools", ...arrows(message, turn), copy, proceed, retry, plain);
  const article = element("article", "assistant", element("h2", "hidden", "Model"), reasoning, text, error, notes, how, status, tools);

  function update() {
    const { timings, live } = message;
    reasoning.hidden = !message.reasoning;
    reasoning.firstChild.textContent = live && !message.content ? "Thinking…" : "Reasoning";
    reasoning.lastChild.textContent = message.reasoning ?? "";
    render(text, message.content);
    article.classList.toggle("writing", Boolean(live && message.content));
    status.hidden = !live?.status;
    status.replaceChildren(live?.status ?? "", ...(live?.of ? [bar] : []));
    if (live?.of) Object.assign(bar, { max: live.of, value: live.processed });
    error.hidden = !message.error;
    if (error.textContent !== (message.error ?? "")) error.textContent = message.error ?? "";
    notes.hidden = !message.notes;
    notes.replaceChildren(...(message.notes ?? []).map((note) => element("span", "note", note)));
    how.hidden = !timings;
    if (timings) how.firstChild.replaceChildren(element("strong", isGain(timings) ? "gain" : "", claim(timings)), ` ${reason(timings)}`);
    tools.hidden = Boolean(live);
    copy.hidden = !message.content;
    proceed.hidden = !message.cut;
    retry.textContent = message.error ? "Retry" : "Regenerate";
    plain.hidden = !message.request || !timings?.draft_n;
  }
  update();
  return { article, update };
}

function fold(className, title, ...children) {
  return element("details", className, element("summary", "", title), ...children);
}

function chart() {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", "The rounds of the answer, by their time");
  const keys = [["draft", "draft"], ["verify", "target"], ["rest", "everything else"]];
  return element("figure", "chart", svg, element("figcaption", "", ...keys.map(([key, name]) => element("span", `key ${key}`, name))));
}

function explain(how, { timings, rounds, spans, model }) {
  const [, words, figure, text] = how.children;
  words.textContent = account(timings) + (model ? ` Model: ${model}.` : "");
  figure.hidden = text.hidden = !rounds?.length; // a reload loses them
  if (!figure.hidden) show(figure, text, rounds, spans);
  how.scrollIntoView({ block: "nearest" }); // it opens at the end of the page
}

function show(figure, text, rounds, spans) {
  draw(figure.firstChild, rounds);
  const accepted = element("span", "drafted", "accepted draft tokens");
  const tinted = spans.map((span) => element("span", span.drafted ? "drafted" : "", span.text));
  text.replaceChildren(element("p", "faint", "The answer, with ", accepted, ":"), ...tinted);
}

// ---- also for the composer ---------------------------------------------------------------------------------

export const isEnter = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing;

export function size(text) {
  const bytes = new Blob([text]).size;
  return bytes < 1000 ? `${bytes} bytes` : `${(bytes / 1000).toFixed(bytes < 10000 ? 1 : 0)} kB`;
}

// Makes a text area as high as its text; the style sheet sets limits.
export function grow(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + area.offsetHeight - area.clientHeight}px`;
}
