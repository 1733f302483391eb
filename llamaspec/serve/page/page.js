// The page: conversations with the model over the server's API. Text from the model, from files and from the store enters the
// document as text nodes (dom.js, markdown.js), never as HTML.

import { conversation, copied, painter, receive } from "./answers.js";
import { props } from "./client.js";
import { $, element } from "./dom.js";
import { attach, hasFiles, LARGEST_FILE, takeFiles } from "./files.js";
import { showList } from "./list.js";
import { chosenModel, updateMenu } from "./models.js";
import { claim, comparison } from "./speed.js";
import { deleteChat, loadChats, loadSettings, newChat, saveChat, saveSettings } from "./store.js";
import { exportChats, importedChats } from "./transfer.js";
import { branch, turn } from "./versions.js";
import { answerView, grow, isEnter, userView } from "./view.js";

const SETTINGS = ["system", "temperature", "top-p", "reasoning", "max-tokens", "seed", "models", "theme"];
const SAVING = 1000; // milliseconds after which an answer that is being generated is stored again
const NEAR = 60; // pixels from the bottom, within which the page scrolls with the text

const chats = loadChats();
let current = chats.get(location.hash.slice(1)) ?? newChat(loadSettings().system); // the one that is shown; stored once it has a message
const runs = new Map(); // id of a conversation → AbortController of the answer that is being generated
const views = new WeakMap(); // message → its view, if it is shown

// ---- showing ---------------------------------------------------------------------------------------------

function open(chat) {
  current = chat;
  $("system").value = chat.system ?? "";
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
    again: () => answer(current),
    more: () => resume(message),
    compare: () => compare(message),
    turn: (step) => turnAt(message, step),
  };
  const view = message.role === "user" ? userView(message, actions) : answerView(message, actions);
  views.set(message, view);
  $("conversation").append(view.article);
}

function redraw(message) {
  const view = views.get(message);
  if (!view?.article.isConnected) return; // another conversation is shown
  const follows = isAtEnd();
  view.update();
  if (follows) scrollDown();
  showWayDown();
}

function isAtEnd() {
  const main = $("conversation");
  return main.scrollHeight - main.scrollTop - main.clientHeight < NEAR;
}

const showWayDown = () => ($("to-end").hidden = isAtEnd());

function scrollDown() {
  $("conversation").scrollTop = $("conversation").scrollHeight;
}

// Updates the list, and everything that depends on whether an answer is being generated.
function refresh() {
  const isBusy = runs.has(current.id);
  document.body.classList.toggle("busy", isBusy);
  $("stop").hidden = !isBusy;
  $("send").hidden = isBusy;
  showList(chats, current, { isRunning: ({ id }) => runs.has(id), open, rename, discard });
  document.title = current.title ? `${current.title} – llamaspec` : "llamaspec";
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
  if (chat === current) open(newChat(loadSettings().system));
  else refresh();
}

function keep(chat) {
  if (!chats.has(chat.id)) return; // deleted while its answer was being generated
  if (!saveChat(chat)) problem("This browser's storage is full. Delete some chats, or new ones will be lost on a reload.");
}

const problem = (text) => ($("problem").textContent = text);

// ---- asking ----------------------------------------------------------------------------------------------

function send(text) {
  const files = takeFiles();
  const message = { role: "user", content: text, ...(files.length && { files }) };
  current.title ||= titled(text) || files[0].name;
  if (!current.messages.length) chats.set(current.id, current);
  current.messages.push(message);
  answer(current);
}

// The beginning of a text in one line, without the marks of code.
const titled = (text) => text.replace(/`+/g, "").trim().replace(/\s+/g, " ").slice(0, 60);

function resend(message, text) {
  const { role, files } = message;
  branch(current.messages, current.messages.indexOf(message), { role, content: text, files });
  answer(current);
}

function turnAt(message, step) {
  const index = current.messages.indexOf(message);
  turn(current.messages, index, step);
  keep(current);
  open(current);
  const { article } = views.get(current.messages[index]);
  article.scrollIntoView({ block: "nearest" });
  article.querySelector(`.versions button:${step < 0 ? "first" : "last"}-child`).focus();
}

// Generates an answer to the last message of the user. If there is one, it stays as another version.
function answer(chat) {
  const seed = $("seed").value === "" ? Math.floor(Math.random() * 2 ** 32) : Number($("seed").value);
  const message = { role: "assistant", content: "", seed };
  const last = chat.messages.at(-1);
  if (last.role === "assistant") branch(chat.messages, chat.messages.length - 1, message);
  else chat.messages.push(message);
  chat.changed = Date.now();
  return generate(chat, message);
}

// Continues an answer that was stopped, as a larger limit would have done.
function resume(message) {
  for (const field of ["timings", "rounds", "spans", "notes", "error"]) delete message[field];
  return generate(current, message);
}

// Generates the answer at the end of a conversation, or the rest of it.
async function generate(chat, message) {
  const nBegun = message.content.length;
  const request = {
    messages: conversation(chat.messages, (chat.system ?? "").trim()),
    seed: message.seed,
    ...chosenModel(),
    ...($("temperature").value !== "" && { temperature: Number($("temperature").value) }),
    ...($("top-p").value !== "" && { top_p: Number($("top-p").value) }),
    ...($("reasoning").value && { chat_template_kwargs: { enable_thinking: $("reasoning").value === "on" } }),
    ...($("max-tokens").value !== "" && { max_tokens: Number($("max-tokens").value) }),
    speculative: { spans: true, rounds: true },
  };
  Object.assign(message, { request, nBegun, model: request.model });
  await run(chat, message, async (signal, tell) => {
    const end = await receive(message, request, $("key").value, signal, tell);
    const isAtLimit = end.timings.predicted_n >= request.max_tokens;
    message.rounds = end.rounds;
    message.timings = { ...end.timings, copied: copied(end.rounds) };
    message.cut = end.choices[0].finish_reason === "length" && isAtLimit;
    const limit = isAtLimit ? `the limit of ${request.max_tokens} tokens (see the settings)` : "the end of the context";
    if (end.choices[0].finish_reason === "length") note(message, `The answer stopped at ${limit}.`);
    if (nBegun) note(message, "These are the figures of the part that was added last.");
    if (!message.content) note(message, "The answer is empty.");
  });
}

// Generates the same text without drafts: the same seed gives the same text.
async function compare(message) {
  const request = { ...message.request, speculative: { enabled: false } };
  const plain = { content: "" };
  await run(current, message, async (signal, tell) => {
    const tellAgain = ({ status, isGenerating, ...more }) =>
      tell({ ...more, status: isGenerating ? `Generating the same text without drafts… ${status}` : status });
    const { timings } = await receive(plain, request, $("key").value, signal, tellAgain);
    note(message, comparison(message.timings, timings, plain.content === message.content.slice(message.nBegun)));
  });
  views.get(message).article.querySelector(".notes").scrollIntoView({ block: "nearest" });
}

const note = (message, text) => (message.notes ??= []).push(text);

// Does work that can be stopped; the view of a message shows its progress.
async function run(chat, message, work) {
  const controller = new AbortController();
  runs.set(chat.id, controller);
  message.live = { status: "Waiting for the server…" };
  const repaint = painter(() => redraw(message));
  const saving = setInterval(() => keep(chat), SAVING);
  keep(chat);
  if (!message.timings) open(chat);
  refresh();
  redraw(message);
  try {
    await work(controller.signal, (live) => {
      message.live = live;
      if (live.isLoading) refreshMenu();
      repaint();
    });
    $("announcement").textContent = `The answer is complete. ${claim(message.timings)}`;
  } catch (error) {
    const isStop = error.name === "AbortError";
    if (isStop || message.timings) note(message, isStop ? "Stopped." : error.message);
    else message.error = error.message;
    if (!message.timings) message.cut = Boolean(message.content || message.reasoning);
  }
  clearInterval(saving);
  delete message.live;
  runs.delete(chat.id);
  keep(chat);
  redraw(message);
  refresh();
  refreshMenu();
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

async function bringFiles(chosen) {
  problem(await attach(chosen));
  $("message").focus();
}

// ---- wiring ----------------------------------------------------------------------------------------------

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("message").value;
  if (runs.has(current.id) || !(text.trim() || hasFiles())) return;
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
$("new").addEventListener("click", () => {
  $("search").value = "";
  open(newChat(loadSettings().system));
});
$("search").addEventListener("input", refresh);
$("search").addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || !$("search").value) return;
  event.stopPropagation();
  $("search").value = "";
  refresh();
});
addEventListener("pagehide", () => {
  for (const chat of chats.values()) if (runs.has(chat.id)) keep(chat);
});
$("attach").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", async () => {
  await bringFiles($("file").files);
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
  bringFiles(event.dataTransfer.files);
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
$("system").addEventListener("change", () => {
  current.system = $("system").value;
  keep(current);
});
$("to-end").addEventListener("click", scrollDown);
$("conversation").addEventListener("scroll", showWayDown);
const setTheme = () => (document.documentElement.dataset.theme = $("theme").value);
$("theme").addEventListener("change", setTheme);
$("key").addEventListener("change", look);
$("models").addEventListener("change", look);
$("export").addEventListener("click", () => exportChats(chats.values()));
$("import").addEventListener("click", () => $("chats-file").click());
$("chats-file").addEventListener("change", async () => {
  await bringIn($("chats-file").files[0]);
  $("chats-file").value = "";
});
setTheme();
open(current);
look();
