// The page: conversations with the model over the server's API. Text from the model, from files and from the store enters the
// document as text nodes (dom.js, markdown.js), never as HTML.

import { chat as answerOf, props } from "./client.js";
import { $, button, element } from "./dom.js";
import { chosenModel, updateMenu } from "./models.js";
import { claim, comparison } from "./speed.js";
import { deleteChat, loadChats, loadSettings, newChat, saveChat, saveSettings } from "./store.js";
import { exportChats, importedChats } from "./transfer.js";
import { answerView, grow, isEnter, size, userView } from "./view.js";

const SETTINGS = ["system", "temperature", "max-tokens", "seed", "models"];
const LARGEST_FILE = 256000; // bytes
const COPIES = ["ngram", "prediction", "earlier"]; // sources of draft tokens that are copied from text
const NEAR = 60; // pixels from the bottom, within which the page scrolls with the text

const chats = loadChats();
let current = chats.get(location.hash.slice(1)) ?? newChat(); // the one that is shown; stored once it has a message
let files = []; // {name, text}, to be sent with the next message
const runs = new Map(); // id of a conversation → AbortController of the answer that is being generated
const views = new WeakMap(); // message → its view, if it is shown

// ---- showing ---------------------------------------------------------------------------------------------

function open(chat) {
  current = chat;
  history.replaceState(null, "", `#${chat.id}`); // so that a reload shows it again
  $("conversation").replaceChildren();
  if (!chat.messages.length) {
    const hints = `Text files of up to ${LARGEST_FILE / 1000} kB can be attached or dropped here.`;
    $("conversation").append(element("p", "empty", "Ask the model something", element("span", "faint", hints)));
  }
  chat.messages.forEach(show);
  if (chat.messages.at(-1)?.role === "user") show({ role: "assistant", content: "", error: "There is no answer yet." });
  document.body.classList.remove("chats-open");
  refresh();
  scrollDown();
  if (matchMedia("(pointer: fine)").matches) $("message").focus(); // otherwise a keyboard would cover the page
}

function show(message) {
  $("conversation").querySelector(".empty")?.remove();
  const actions = {
    edit: (text) => resend(message, text),
    again: regenerate,
    compare: () => compare(message),
  };
  const view = message.role === "user" ? userView(message, actions) : answerView(message, actions);
  views.set(message, view);
  $("conversation").append(view.article);
}

function redraw(message) {
  const view = views.get(message);
  if (!view?.article.isConnected) return; // another conversation is shown
  const main = $("conversation");
  const follows = main.scrollHeight - main.scrollTop - main.clientHeight < NEAR;
  view.update();
  if (follows) scrollDown();
}

function scrollDown() {
  $("conversation").scrollTop = $("conversation").scrollHeight;
}

// Updates the list, and everything that depends on whether an answer is being generated.
function refresh() {
  const isBusy = runs.has(current.id);
  document.body.classList.toggle("busy", isBusy);
  $("stop").hidden = !isBusy;
  $("send").hidden = isBusy;
  const sorted = [...chats.values()].sort((a, b) => b.changed - a.changed);
  $("list").replaceChildren(...sorted.map(listed));
  document.title = current.title ? `${current.title} – llamaspec` : "llamaspec";
}

function listed(chat) {
  const title = button(chat.title, () => open(chat), "title");
  const item = element("li", runs.has(chat.id) ? "running" : "", title);
  if (chat === current) title.setAttribute("aria-current", "true");
  const [change, remove] = [button("Rename", () => rename(chat)), button("Delete", () => discard(chat))];
  change.setAttribute("aria-label", `Rename ${chat.title}`);
  remove.setAttribute("aria-label", `Delete ${chat.title}`);
  item.append(element("span", "tools", change, remove));
  return item;
}

function rename(chat) {
  chat.title = prompt("Title", chat.title)?.trim() || chat.title;
  keep(chat);
  refresh();
}

function discard(chat) {
  if (!confirm(`Delete “${chat.title}”?`)) return;
  runs.get(chat.id)?.abort();
  chats.delete(chat.id);
  deleteChat(chat.id);
  if (chat === current) open(newChat());
  else refresh();
}

function keep(chat) {
  if (!chats.has(chat.id)) return; // deleted while its answer was being generated
  if (!saveChat(chat)) problem("This browser's storage is full. Delete some chats, or new ones will be lost on a reload.");
}

const problem = (text) => ($("problem").textContent = text);

// ---- asking ----------------------------------------------------------------------------------------------

function send(text) {
  const message = { role: "user", content: text, ...(files.length && { files }) };
  current.title ||= (text.trim() || files[0].name).slice(0, 60);
  files = [];
  showFiles();
  if (!current.messages.length) chats.set(current.id, current);
  current.messages.push(message);
  answer(current);
}

function resend(message, text) {
  message.content = text;
  current.messages.length = current.messages.indexOf(message) + 1;
  answer(current);
}

function regenerate() {
  if (current.messages.at(-1).role === "assistant") current.messages.pop();
  answer(current);
}

// Generates the answer to the last message of a conversation.
async function answer(chat) {
  const seed = $("seed").value === "" ? Math.floor(Math.random() * 2 ** 32) : Number($("seed").value);
  const request = {
    messages: conversation(chat),
    seed,
    ...chosenModel(),
    ...($("temperature").value !== "" && { temperature: Number($("temperature").value) }),
    ...($("max-tokens").value !== "" && { max_tokens: Number($("max-tokens").value) }),
    speculative: { spans: true, rounds: true },
  };
  const message = { role: "assistant", content: "", request, model: request.model };
  chat.messages.push(message);
  chat.changed = Date.now();
  await run(chat, message, async (signal) => {
    const end = await receive(message, request, signal, message);
    message.rounds = end.rounds;
    message.timings = { ...end.timings, copied: copied(end.rounds) };
    const isAtLimit = end.timings.predicted_n >= request.max_tokens;
    const limit = isAtLimit ? `the limit of ${request.max_tokens} tokens (see the settings)` : "the end of the context";
    if (end.choices[0].finish_reason === "length") note(message, `The answer stopped at ${limit}.`);
    if (!message.content) note(message, "The answer is empty.");
  });
}

// Generates the same answer without the draft: the same seed gives the same text.
async function compare(message) {
  const request = { ...message.request, speculative: { enabled: false } };
  const plain = { content: "" };
  await run(current, message, async (signal) => {
    const { timings } = await receive(plain, request, signal, message);
    note(message, comparison(message.timings, timings, plain.content === message.content));
  });
  views.get(message).article.querySelector(".speed").scrollIntoView({ block: "nearest" });
}

const note = (message, text) => (message.notes ??= []).push(text);

// Does work that can be stopped; the view of a message shows its progress.
async function run(chat, message, work) {
  const controller = new AbortController();
  runs.set(chat.id, controller);
  message.live = { status: "Waiting for the server…" };
  keep(chat);
  if (!message.timings) open(chat);
  refresh();
  redraw(message);
  try {
    await work(controller.signal);
    $("announcement").textContent = `The answer is complete. ${claim(message.timings)}`;
  } catch (error) {
    const isStop = error.name === "AbortError";
    if (isStop || message.timings) note(message, isStop ? "Stopped." : error.message);
    else message.error = error.message;
  }
  delete message.live;
  runs.delete(chat.id);
  keep(chat);
  redraw(message);
  refresh();
  refreshMenu();
}

// Returns the messages to send: with attached files, and with roles that alternate.
function conversation(chat) {
  const system = $("system").value.trim();
  const sent = system ? [{ role: "system", content: system }] : [];
  for (const { role, content, reasoning, files = [] } of chat.messages) {
    const text = [content, ...files.map(fenced)].filter(Boolean).join("\n\n");
    if (!text) continue;
    if (sent.at(-1)?.role === role) sent.at(-1).content += `\n\n${text}`;
    else sent.push({ role, content: text, ...(reasoning && { reasoning_content: reasoning }) });
  }
  return sent;
}

function fenced({ name, text }) {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([ticks]) => ticks.length));
  const fence = "`".repeat(longest + 1);
  return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
}

// Adds the answer to `into`, shows the progress at `shown`, and returns the last chunk, which has the timings.
async function receive(into, request, signal, shown) {
  const repaint = painter(() => redraw(shown));
  let end = null;
  for await (const chunk of answerOf(request, $("key").value, signal)) {
    const { content, reasoning_content: reasoning, role } = chunk.choices?.[0]?.delta ?? {};
    if (reasoning) into.reasoning = (into.reasoning ?? "") + reasoning;
    if (content) {
      into.content += content;
      (into.spans ??= []).push(...(chunk.spans ?? []));
    }
    if (chunk.loading) {
      shown.live = { status: `Loading ${chunk.loading}…` };
      refreshMenu();
    } else if (chunk.waiting) shown.live = { status: "Waiting for other requests…" };
    else if (chunk.of) shown.live = { ...chunk, status: `Processing the prompt: ${chunk.processed} of ${chunk.of} tokens` };
    else if (role) shown.live = { status: "Processing the prompt…" };
    else if (content || reasoning) shown.live = { status: into === shown ? "" : "Generating the same answer without the draft…" };
    if (chunk.timings) end = chunk;
    repaint();
  }
  return end;
}

// Calls `paint` at most once a frame, and never for more than a third of the time.
function painter(paint) {
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

// Counts the draft tokens that were copied from earlier text.
function copied(rounds) {
  const copies = rounds.filter(({ source }) => COPIES.includes(source));
  const sum = (name) => copies.reduce((total, round) => total + round[name], 0);
  return { drafted: sum("drafted"), accepted: sum("accepted") };
}

// ---- files -----------------------------------------------------------------------------------------------

async function attach(chosen) {
  problem("");
  for (const file of chosen) {
    if (file.size > LARGEST_FILE) problem(`${file.name} is larger than ${LARGEST_FILE / 1000} kB.`);
    else {
      try {
        const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
        if (text.includes("\0")) throw new Error("binary");
        files.push({ name: file.name, text });
      } catch {
        problem(`${file.name} is not a text file.`);
      }
    }
  }
  showFiles();
  $("message").focus();
}

function showFiles() {
  const items = files.map((file) => {
    const remove = button("Remove", () => {
      files = files.filter((other) => other !== file);
      showFiles();
    });
    remove.setAttribute("aria-label", `Remove ${file.name}`);
    return element("li", "", `${file.name}, ${size(file.text)} `, remove);
  });
  $("files").replaceChildren(...items);
}

// ---- the server ------------------------------------------------------------------------------------------

const showMenu = () => updateMenu($("key").value, loadSettings().models);
const refreshMenu = () => showMenu().catch(() => {}); // whoever needs the server says that it does not answer

async function look() {
  try {
    await showMenu();
    const about = await props($("key").value, chosenModel());
    const verdict = about.speculative?.verdict;
    $("verdict").textContent = verdict ? `So far, ${verdict}.` : "";
    const hasNone = about.has_chat_template === false; // of a model that is not loaded, it is not known yet
    problem(hasNone ? "This model has no chat template: start the server with --chat-template." : "");
  } catch (error) {
    problem(error.message);
  }
}

// Adds the conversations of a file. Of two with the same id, the one that changed last stays.
async function bringIn(file) {
  problem("");
  try {
    for (const chat of await importedChats(file)) {
      if (chat.changed < (chats.get(chat.id)?.changed ?? -1)) continue;
      chats.set(chat.id, chat);
      keep(chat);
      if (chat.id === current.id) open(chat);
    }
    refresh();
  } catch (error) {
    problem(error.message);
  }
}

// ---- wiring ----------------------------------------------------------------------------------------------

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("message").value;
  if (runs.has(current.id) || !(text.trim() || files.length)) return;
  $("message").value = "";
  grow($("message"));
  problem("");
  send(text);
});
$("message").addEventListener("input", () => grow($("message")));
$("message").addEventListener("keydown", (event) => {
  if (!isEnter(event)) return;
  event.preventDefault();
  $("form").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || $("settings").open) return;
  if (document.body.classList.contains("chats-open")) toggleChats();
  else runs.get(current.id)?.abort();
});
$("stop").addEventListener("click", () => runs.get(current.id)?.abort());
$("new").addEventListener("click", () => open(newChat()));
$("attach").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", async () => {
  await attach($("file").files);
  $("file").value = "";
});
document.addEventListener("dragover", (event) => {
  if (!event.dataTransfer.types.includes("Files")) return;
  event.preventDefault();
  document.body.classList.add("dropping");
});
document.addEventListener("dragleave", (event) => event.relatedTarget ?? document.body.classList.remove("dropping"));
document.addEventListener("drop", (event) => {
  if (!event.dataTransfer.files.length) return;
  event.preventDefault();
  document.body.classList.remove("dropping");
  attach(event.dataTransfer.files);
});
function toggleChats() {
  const isOpen = document.body.classList.toggle("chats-open");
  $("open-chats").setAttribute("aria-expanded", String(isOpen));
  (isOpen ? $("new") : $("open-chats")).focus();
}
$("open-chats").addEventListener("click", toggleChats);
$("conversation").addEventListener("click", () => document.body.classList.contains("chats-open") && toggleChats());
$("open-settings").addEventListener("click", () => $("settings").showModal());
for (const id of SETTINGS) {
  $(id).value = loadSettings()[id] ?? "";
  $(id).addEventListener("change", () => saveSettings(Object.fromEntries(SETTINGS.map((name) => [name, $(name).value]))));
}
$("key").addEventListener("change", look);
$("models").addEventListener("change", look);
$("export").addEventListener("click", () => exportChats(chats.values()));
$("import").addEventListener("click", () => $("chats-file").click());
$("chats-file").addEventListener("change", async () => {
  await bringIn($("chats-file").files[0]);
  $("chats-file").value = "";
});
open(current);
look();
